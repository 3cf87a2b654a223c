"""Attention in segments: the definition on the CPU, the kernel where there is a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import ModernBertConfig, ModernBertForSequenceClassification, PreTrainedModel
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from pl_pointwise.errors import UnsupportedError
from pl_pointwise.tasks.common import varlen
from pl_pointwise.tasks.common.varlen import (
    CAUSAL,
    EVERYTHING,
    Segments,
    Window,
    attend,
    by_definition,
    kernel_problem,
    window_of,
)
from pl_pointwise.tasks.language_model.batch import collate_responses
from pl_pointwise.tasks.language_model.scoring import ResponseScorer
from pl_pointwise.tasks.language_model.shared_prompt import Sample, segments_of
from pl_pointwise.tasks.reranker import scoring

WINDOWS: list[Window] = [EVERYTHING, CAUSAL, (3, 0), (2, 4)]


def random_attention(queries: list[int], keys: list[int], key_heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = [(sum(queries), 4), (sum(keys), key_heads), (sum(keys), key_heads)]
    return [torch.randn(*row, 8, dtype=torch.float64, generator=generator) for row in rows]


# What segments are --------------------------------------------------------------------------------


@pytest.mark.parametrize("window", WINDOWS)
def test_the_definition_is_attention_under_the_mask_written_out(window: Window) -> None:
    """Token by token, in float64; the last query of a segment stands at its last key."""
    queries, keys = [3, 1, 5], [3, 6, 9]
    q, k, v = random_attention(queries, keys)
    found = by_definition(q, k, v, Segments.of(queries, keys), window, 0.4)
    expected = torch.zeros_like(q)
    row = start = 0
    for n, m in zip(queries, keys, strict=True):
        for i in range(n):
            position = i + m - n
            first = 0 if window[0] < 0 else max(0, position - window[0])
            last = m - 1 if window[1] < 0 else min(m - 1, position + window[1])
            for head in range(4):
                seen = slice(start + first, start + last + 1)
                weights = (0.4 * (k[seen, head // 2] @ q[row + i, head])).softmax(0)
                expected[row + i, head] = weights @ v[seen, head // 2]
        row, start = row + n, start + m
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


def test_a_shared_prompt_is_a_segment_for_each_response() -> None:
    """Two samples: three responses of 2, 1 and 0 tokens fed, and one response."""
    segments = segments_of([Sample(3, (2, 1, 0)), Sample(2, (1,))])
    assert segments.query_ends.tolist() == [0, 5, 6, 9]
    assert segments.key_ends.tolist() == [0, 5, 9, 12]
    assert segments.longest == (5, 5)
    assert segments.source is not None
    assert segments.source.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("rule", "window"),
    [
        (bidirectional_mask_function, EVERYTHING),
        (causal_mask_function, CAUSAL),
        (sliding_window_causal_mask_function(9), (8, 0)),
        (sliding_window_causal_mask_function(500), CAUSAL),  # never reached
        (sliding_window_bidirectional_mask_function(7), (7, 7)),
        (chunked_causal_mask_function(40, torch.zeros(1, dtype=torch.long)), None),
    ],
)
def test_a_models_rule_is_read_as_a_window(rule: Any, window: Window | None) -> None:
    assert window_of(rule, 200) == window
    if window is not None:
        seen = varlen._within(window, torch.arange(200) - torch.arange(200)[:, None])
        at = torch.arange(200)
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.long)
        whole = rule(zero, zero, at[None, None, :, None], at[None, None, None, :])
        assert torch.equal(whole.expand(1, 1, 200, 200)[0, 0], seen)


# Models through segments --------------------------------------------------------------------------


def modernbert() -> PreTrainedModel:
    config = ModernBertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=48, max_position_embeddings=64, initializer_range=0.3, pad_token_id=0,
        num_labels=1, local_attention=8, classifier_pooling="mean",
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ModernBertForSequenceClassification._from_config(config, attn_implementation="sdpa")


def scores_and_gradients(
    model: PreTrainedModel, way: Callable[..., Tensor]
) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([31, 4, 17, 4, 60, 1])
    ids = torch.randint(3, 60, (6, 60), generator=generator)
    found = way(model, {"input_ids": ids}, lengths, torch.arange(6))
    loss = (found * torch.linspace(-1, 2, 6)).sum()
    gradients = torch.autograd.grad(
        loss, list(model.parameters()), allow_unused=True, materialize_grads=True
    )
    return found.detach(), list(gradients)


def test_packed_pairs_in_segments_score_as_padded_ones_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ModernBERT, whose windows are shorter than the pairs, in float64, gradients too."""
    model = modernbert().double()
    expected, gradients = scores_and_gradients(model, scoring.grouped_scores)
    assert expected.std() > 0.1
    calls: list[Window] = []

    def noted(*arguments: Any) -> Tensor:
        calls.append(arguments[4])
        return by_definition(*arguments)

    monkeypatch.setattr(varlen, "by_definition", noted)
    monkeypatch.setattr(scoring, "attends_in_segments", lambda device: True)
    found, others = scores_and_gradients(model, scoring.packed_scores)
    assert set(calls) == {EVERYTHING, (4, 4)}
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
    for value, wanted in zip(others, gradients, strict=True):
        torch.testing.assert_close(value, wanted, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3", "qwen2"])
def test_a_shared_prompt_in_segments_gives_what_whole_sequences_give(
    architecture: str,
    make_model: Callable[..., PreTrainedModel],
    make_adapted: Callable[..., PeftModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Key heads shared, windows by position, in float64, gradients of the adapters too."""
    model = make_adapted(make_model(architecture, attention="sdpa")).double().eval()
    generator = torch.Generator().manual_seed(3)
    sizes = [(17, (4, 9)), (5, (1,)), (23, (11, 3, 6)), (4, (2, 1))]

    def ids(count: int) -> list[int]:
        return torch.randint(3, 97, (count,), generator=generator).tolist()

    batch = collate_responses(
        [ids(prompt) for prompt, _ in sizes], [[ids(n) for n in of] for _, of in sizes]
    )
    results = []
    for method in ("plain", "shared_prompt"):
        calls = []

        def noted(*arguments: Any, calls: list[int] = calls) -> Tensor:
            calls.append(1)
            return by_definition(*arguments)

        scorer = ResponseScorer(model, method)
        if method == "shared_prompt":
            scorer.in_segments = True
            monkeypatch.setattr(varlen, "by_definition", noted)
        model.zero_grad()
        found = scorer(batch)
        assert found.kl is not None
        weights = torch.linspace(0.5, 1.5, found.kl.numel()).view_as(found.kl)
        ((found.log_likelihood + 3 * found.kl) * weights).sum().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results.append((found, gradients))
        # three layers, policy and reference
        assert len(calls) == (6 if method == "shared_prompt" else 0)
    (plain, wanted), (shared, got) = results
    assert plain.kl is not None
    assert plain.kl.max() > 0.01
    torch.testing.assert_close(shared.log_likelihood, plain.log_likelihood, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(shared.kl, plain.kl, atol=1e-6, rtol=1e-6)
    for value, expected in zip(got, wanted, strict=True):
        assert (value - expected).norm() <= 1e-5 * expected.norm()  # norms are taken in float32


# The kernel ---------------------------------------------------------------------------------------


def test_what_the_kernel_has_not_is_refused_by_name() -> None:
    q, k, v = (each.transpose(0, 1)[None] for each in random_attention([3], [3]))
    with pytest.raises(UnsupportedError, match="has no softcap, dropout"):
        attend(Segments.of([3], [3]), CAUSAL, q, k, v, softcap=30.0, dropout=0.1)


def test_without_a_gpu_there_is_no_kernel() -> None:
    assert kernel_problem(modernbert()) == "there is no GPU"


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@on_gpu
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("sizes", [(32, 8, 64), (12, 12, 64)], ids=["Llama-3.2-1B", "ModernBERT"])
def test_the_kernel_computes_the_definition_on_a_gpu(
    sizes: tuple[int, int, int], window: Window
) -> None:
    heads, key_heads, size = sizes
    queries, keys = [37, 130, 1, 64, 200], [37, 161, 60, 64, 333]
    segments = Segments.of(queries, keys).to(torch.device("cuda"))
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(queries), heads), (sum(keys), key_heads), (sum(keys), key_heads)]
    inputs = [torch.randn(*shape, size, generator=generator).cuda() for shape in shapes]
    weights = torch.randn(*shapes[0], size, generator=generator).cuda()
    results = []
    for compute, dtype in ((varlen.by_kernel, torch.bfloat16), (by_definition, torch.float32)):
        given = [each.to(dtype).requires_grad_() for each in inputs]
        found = compute(*given, segments, window, 3 * size**-0.5).float()
        results.append([found, *torch.autograd.grad((found * weights).sum(), given)])
    for value, expected in zip(*results, strict=True):
        assert (value.float() - expected).norm() < 3e-2 * expected.norm()


@on_gpu
def test_pairs_score_on_a_gpu_in_bfloat16_as_in_float32() -> None:
    model = modernbert().cuda()
    lengths = torch.tensor([31, 4, 17, 4, 60, 1])
    ids = torch.randint(3, 60, (6, 60), generator=torch.Generator().manual_seed(1)).cuda()
    inputs, everything = {"input_ids": ids}, torch.arange(6)
    with torch.no_grad():
        expected = scoring.grouped_scores(model, inputs, lengths, everything)
        with torch.autocast("cuda", torch.bfloat16):
            assert kernel_problem(model) is None
            found = scoring.packed_scores(model, inputs, lengths, everything)
    error = (found - expected).abs().max()
    assert error < 0.1 * expected.std() + 3e-2 * math.sqrt(float(expected.square().mean()))
