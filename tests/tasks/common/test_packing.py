"""A packed row gives what the padded batch gives, whatever the attention and the head."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForSequenceClassification, PreTrainedModel

from pl_pointwise.errors import UnsupportedError
from pl_pointwise.tasks.common import packing
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
MODELS: dict[str, dict[str, Any]] = {
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "modernbert, mean": {"local_attention": WINDOW, "classifier_pooling": "mean"},
    "modernbert, first token": {"local_attention": WINDOW, "classifier_pooling": "cls"},
}


def make(kind: str) -> PreTrainedModel:
    config = CONFIG_MAPPING[kind.partition(",")[0]](**SIZES, **MODELS[kind])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForSequenceClassification.from_config(config)
    return model.train()


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
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


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
        assert (found[name] - gradient).abs().max() <= 1e-4 * gradient.abs().max() + 1e-6, name


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
def test_what_other_sequences_hold_and_what_padding_holds_is_never_read(kind: str) -> None:
    model, inputs = make(kind).eval(), inputs_of(LENGTHS)
    first = packed_logits(model, inputs)
    inputs["input_ids"][inputs["attention_mask"] == 0] = 7
    inputs["input_ids"][0] = 8
    second = packed_logits(model, inputs)
    torch.testing.assert_close(second[1:], first[1:], atol=1e-6, rtol=1e-6)
    assert abs(float((second - first)[0].detach())) > 1e-3


@pytest.mark.parametrize("masked", [False, True])
def test_our_attention_is_softmax_attention_with_factors_in_between(
    masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The factors are given here; which ones it draws is the dropout's affair."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 2, 7, 4, dtype=torch.float64, generator=generator) for _ in range(3))
    factors = torch.rand(3, 2, 7, 7, dtype=torch.float64, generator=generator)
    monkeypatch.setattr(packing, "quick_dropout", lambda values, p: values * factors)
    seen = torch.ones(7, 7, dtype=torch.bool)
    if masked:
        seen = (torch.arange(7)[:, None] - torch.arange(7)).abs() <= 2
    weights = torch.einsum("nhqd,nhkd->nhqk", q, k).mul(0.3).exp() * seen
    weights = weights / weights.sum(-1, keepdim=True) * factors
    expected = torch.einsum("nhqk,nhkd->nqhd", weights, v)
    actual, _ = softmax_attention(
        torch.nn.Module(), q, k, v, seen[None, None] if masked else None, dropout=0.5, scaling=0.3
    )
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


DRAWS = 150


@pytest.mark.parametrize("kind", ["bert", "modernbert, mean"])
def test_attention_dropout_in_training_drops_the_same_share_as_the_models_own(kind: str) -> None:
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


def test_a_model_that_cannot_be_packed_is_refused() -> None:
    model = make("bert")
    with pytest.raises(UnsupportedError, match="BertModel has no encoder inside it"):
        install(model.bert)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedError, match='"flash_attention_2" is not "sdpa"'):
        install(model)
    assert not model.base_model._forward_hooks


@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=40), gradients=st.booleans())
def test_a_row_taken_apart_and_put_together_is_the_row(lengths: list[int], gradients: bool) -> None:
    layout = Packing.of(torch.tensor(lengths), max(lengths))
    size = len(layout.source)
    assert size == sum(lengths)
    with torch.set_grad_enabled(gradients):
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
    found = torch.cat([output[inside] for output, inside in zip(outputs, there, strict=True)])
    assert torch.equal(found[None], expected)  # each token in its place of its sequence
