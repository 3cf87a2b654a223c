"""A packed row gives what the padded batch gives, whatever the attention and the head.

Also its dropout, whose draws are its own.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    PreTrainedModel,
)

from pl_pointwise.errors import UnsupportedError
from pl_pointwise.tasks.common.dropout import QuickDropout, drawn
from pl_pointwise.tasks.common.packing import (
    Batches,
    Packing,
    install,
    packed,
    softmax_attention,
    uninstall,
)
from pl_pointwise.tasks.language_model.model.loading import checkpoint_gradients

LENGTHS = [31, 4, 17, 4, 60, 1]
WINDOW = 8  # far shorter than the longest
SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "num_labels": 1,
}


def bert() -> PreTrainedModel:
    config = BertConfig(
        **SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return BertForSequenceClassification._from_config(config)


def modernbert(pooling: str = "mean") -> PreTrainedModel:
    config = ModernBertConfig(
        **SIZES, local_attention=WINDOW, classifier_pooling=pooling
    )
    return ModernBertForSequenceClassification._from_config(config)


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "bert": bert,
    "modernbert, mean": modernbert,
    "modernbert, first token": lambda: modernbert("cls"),
}


def make(kind: str) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[kind]().train()


def inputs_of(lengths: list[int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(3, 60, mask.shape, generator=generator)
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def packed_logits(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    install(model)
    lengths = inputs["attention_mask"].sum(1)
    with packed(model, Packing.of(lengths, inputs["input_ids"].shape[1])):
        logits: Tensor = model(**inputs).logits
    return logits


def gradients(model: PreTrainedModel, logits: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (logits[:, 0] * torch.linspace(-1, 2, len(logits))).sum().backward()
    return {
        name: p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


@pytest.mark.parametrize("kind", list(MODELS))
def test_packed_equals_padded_in_float32(kind: str) -> None:
    """Logits to 1e-5; gradients to 1e-4 of each parameter's largest."""
    model, inputs = make(kind), inputs_of(LENGTHS)
    expected = model(**inputs).logits
    assert expected.std() > 0.1
    wanted = gradients(model, expected)
    actual = packed_logits(model, inputs)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    found = gradients(model, actual)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (
            found[name] - gradient
        ).abs().max() <= 1e-4 * gradient.abs().max() + 1e-6, name


@pytest.mark.parametrize("kind", list(MODELS))
def test_gradient_checkpointing_changes_nothing(kind: str) -> None:
    """The layers run again during the backward pass, when the packing is no longer in use."""
    model, inputs = make(kind), inputs_of(LENGTHS)
    wanted = gradients(model, packed_logits(model, inputs))
    checkpoint_gradients(model)
    found = gradients(model, packed_logits(model, inputs))
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", list(MODELS))
def test_what_other_sequences_hold_and_what_padding_holds_is_never_read(
    kind: str,
) -> None:
    model, inputs = make(kind).eval(), inputs_of(LENGTHS)
    first = packed_logits(model, inputs)
    inputs["input_ids"][inputs["attention_mask"] == 0] = 7
    inputs["input_ids"][0] = 8
    second = packed_logits(model, inputs)
    torch.testing.assert_close(second[1:], first[1:], atol=1e-6, rtol=1e-6)
    assert abs(float((second - first)[0].detach())) > 1e-3


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("masked", [False, True])
def test_our_attention_and_its_gradient_are_softmax_attention(
    masked: bool, dropout: float
) -> None:
    """In float64, beside autograd through einsum, with the factors that were drawn."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, into = (
        torch.randn(3, 2, 7, 4, dtype=torch.float64, generator=generator)
        for _ in range(4)
    )
    inputs = [each.requires_grad_() for each in (q, k, v)]
    seen = torch.ones(7, 7, dtype=torch.bool)
    if masked:
        seen = (torch.arange(7)[:, None] - torch.arange(7)).abs() <= 2
    torch.manual_seed(5)
    mask = seen[None, None] if masked else None
    actual, _ = softmax_attention(
        torch.nn.Module(), q, k, v, mask, dropout=dropout, scaling=0.3
    )
    found = torch.autograd.grad((actual * into.transpose(1, 2)).sum(), inputs)
    torch.manual_seed(5)
    kept, scale = drawn(torch.empty(6, 7, 7, dtype=torch.float64), dropout)
    factors = kept.view(3, 2, 7, 7) * scale if dropout else torch.ones(())
    weights = torch.einsum("nhqd,nhkd->nhqk", q, k).mul(0.3).exp() * seen
    weights = weights / weights.sum(-1, keepdim=True) * factors
    expected = torch.einsum("nhqk,nhkd->nqhd", weights, v)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)
    wanted = torch.autograd.grad((expected * into.transpose(1, 2)).sum(), inputs)
    for gradient, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, right, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("p", [0.1, 0.5, 2**-16])
def test_what_is_dropped_is_drawn_with_its_probability(p: float) -> None:
    """Within five standard errors; the expectation is exact, the draws follow the seed."""
    torch.manual_seed(3)
    kept, scale = drawn(torch.empty(1000, 997), p)
    count = kept.numel()
    share = 1 - float(kept.double().mean())
    assert abs(share - p) < 5 * (p / count) ** 0.5 + 2**-17
    assert set(kept.unique().tolist()) <= {0.0, 1.0}
    assert scale == 1 / (1 - max(1, round(p * 2**16)) / 2**16)
    torch.manual_seed(3)
    assert torch.equal(drawn(torch.empty(1000, 997), p)[0], kept)
    layer = QuickDropout(p).train()
    values = torch.ones(7, 5, requires_grad=True)
    torch.manual_seed(4)
    layer(values).sum().backward()
    torch.manual_seed(4)
    kept, scale = drawn(values, p)
    torch.testing.assert_close(values.grad, kept * scale)
    assert torch.equal(layer.eval()(values), values)


DRAWS = 150


@pytest.mark.parametrize("kind", ["bert", "modernbert, mean"])
def test_attention_dropout_in_training_drops_the_same_share_as_the_models_own(
    kind: str,
) -> None:
    """Means over many draws agree within five standard errors."""
    model, inputs = make(kind), inputs_of([9, 5, 9])
    for layer in model.modules():
        if hasattr(layer, "attention_dropout"):
            layer.attention_dropout = 0.3
        if type(layer).__name__ == "BertSelfAttention":
            layer.dropout.p = 0.3
    torch.manual_seed(0)
    with torch.no_grad():
        own = torch.stack([model(**inputs).logits for _ in range(DRAWS)])
        ours = torch.stack([packed_logits(model, inputs) for _ in range(DRAWS)])
    error = ((own.var(0) + ours.var(0)) / DRAWS).sqrt()
    assert (error > 1e-4).all()
    assert ((own.mean(0) - ours.mean(0)).abs() < 5 * error).all()
    ratio = own.std(0) / ours.std(0)
    assert ((ratio > 0.7) & (ratio < 1.4)).all()


@pytest.mark.parametrize("kind", list(MODELS))
def test_under_bf16_autocast_packed_is_as_near_to_float32_as_padded(kind: str) -> None:
    model, inputs = make(kind).eval(), inputs_of(LENGTHS)
    with torch.no_grad():
        exact = model(**inputs).logits
        with torch.autocast("cpu", torch.bfloat16):
            padded = model(**inputs).logits.float()
            ours = packed_logits(model, inputs).float()
    error = (padded - exact).abs().max()
    assert 1e-4 < error < 0.1
    assert (ours - exact).abs().max() < 2 * error


def test_places_without_a_token_reach_no_gradient() -> None:
    """Under bf16, where our softmax is used: of a window that reaches no token it would be NaN."""
    model, inputs = make("modernbert, mean"), inputs_of(LENGTHS)
    wanted = gradients(model, model(**inputs).logits)
    with torch.autocast("cpu", torch.bfloat16):
        logits = packed_logits(model, inputs)
    found = gradients(model, logits.float())
    for name, gradient in wanted.items():
        error = torch.linalg.vector_norm(found[name] - gradient)
        assert error < 0.1 * torch.linalg.vector_norm(gradient), name


def test_outside_a_packing_the_model_is_as_it_was_and_so_it_is_when_taken_out() -> None:
    model, inputs = make("modernbert, mean").eval(), inputs_of(LENGTHS)
    expected = model(**inputs).logits
    packed_logits(model, inputs)
    assert torch.equal(model(**inputs).logits, expected)
    copied = pickle.loads(pickle.dumps(model))
    assert torch.equal(copied(**inputs).logits, expected)
    install(model)  # a second time changes nothing
    uninstall(model)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(**inputs).logits, expected)
    encoder = model.base_model
    assert not encoder._forward_hooks
    assert not encoder._forward_pre_hooks


def test_an_installed_models_dropouts_are_quick_and_have_no_state() -> None:
    model = make("bert")
    before, names = list(model.state_dict()), [type(part) for part in model.modules()]
    install(model)
    assert list(model.state_dict()) == before
    found = [type(part) for part in model.modules()]
    assert found == [
        QuickDropout if kind is torch.nn.Dropout else kind for kind in names
    ]


def test_a_model_without_an_encoder_inside_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="BertModel has no encoder inside it"):
        install(make("bert").bert)


def test_an_attention_that_takes_no_mask_is_refused() -> None:
    model = make("bert")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedError, match='"flash_attention_2" is not "sdpa"'):
        install(model)
    assert not model.base_model._forward_hooks


@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=40))
def test_a_row_taken_apart_and_put_together_is_the_row(lengths: list[int]) -> None:
    layout = Packing.of(torch.tensor(lengths), max(lengths))
    size = len(layout.source)
    assert size == sum(lengths)
    batches = Batches.of(layout.lengths)
    row = torch.arange(2.0 * size * 3).view(1, 2, size, 3)  # (1, heads, N, D)
    pieces = batches.apart(row)
    assert [(len(piece), piece.shape[2]) for piece in pieces] == list(batches.shapes)
    expected = row.transpose(1, 2)
    outputs = [piece.transpose(1, 2) for piece in pieces]
    assert torch.equal(batches.together(outputs), expected)
    there = [
        torch.ones(shape, dtype=torch.bool) if inside is None else inside
        for shape, inside in zip(batches.shapes, batches.inside, strict=True)
    ]
    assert [int(n) for each in there for n in each.sum(1)] == sorted(lengths)
    found = torch.cat(
        [output[inside] for output, inside in zip(outputs, there, strict=True)]
    )
    assert torch.equal(found[None], expected)  # each token in its place of its sequence
