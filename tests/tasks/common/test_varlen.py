"""Attention in segments: the segments and masks on the CPU, the kernels where there is a GPU."""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
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
    BY_DEFINITION,
    CAUSAL,
    EVERYTHING,
    KERNELS,
    Call,
    Kernel,
    Segments,
    Window,
    attend,
    by_definition,
    choose_kernel,
    kernel_problem,
    segment_mask,
    window_of,
)
from pl_pointwise.tasks.language_model.batch import collate_responses
from pl_pointwise.tasks.language_model.scoring import ResponseScorer
from pl_pointwise.tasks.language_model.shared_prompt import Sample, segments_of
from pl_pointwise.tasks.reranker import scoring

CPU = torch.device("cpu")
WINDOWS: list[Window] = [EVERYTHING, CAUSAL, (3, 0), (2, 4)]
FLEX = KERNELS[-1]


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
    found = by_definition(q, k, v, Call(Segments.of(queries, keys), window, 0.4))
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


@pytest.mark.parametrize("window", WINDOWS)
def test_flex_attention_computes_the_definition(window: Window) -> None:
    """Uncompiled, on the CPU, values alone: there it has no backward pass."""
    queries, keys = [3, 1, 5], [3, 6, 9]
    inputs = random_attention(queries, keys)
    segments = Segments.of(queries, keys)
    call = Call(segments, window, 0.4)
    found, expected = FLEX.attend(*inputs, call), by_definition(*inputs, call)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    assert list(segments.block_masks) == [window]  # made once, for all layers


@pytest.mark.parametrize("window", WINDOWS)
def test_the_mask_of_segments_is_the_mask_written_out(window: Window) -> None:
    queries, keys = [2, 4], [5, 4]
    seen = segment_mask(Segments.of(queries, keys), window, 6, 9)
    at, of = torch.arange(6)[:, None], torch.arange(9)[None]
    found = seen(torch.tensor(0), torch.tensor(0), at.expand(6, 9), of.expand(6, 9))
    for i in range(6):
        for j in range(9):
            position = i + 3 if i < 2 else i - 2
            ahead = (j if j < 5 else j - 5) - position
            wanted = (i < 2) == (j < 5)
            wanted &= window[0] < 0 or ahead >= -window[0]
            wanted &= window[1] < 0 or ahead <= window[1]
            assert bool(found[i, j]) == wanted, (i, j)


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


def test_packed_pairs_in_segments_score_as_padded_ones_do() -> None:
    """ModernBERT, whose windows are shorter than the pairs, in float64, gradients too."""
    model = modernbert().double()
    expected, gradients = scores_and_gradients(model, scoring.grouped_scores)
    assert expected.std() > 0.1
    calls: list[Window] = []

    def noted(*arguments: Any) -> Tensor:
        calls.append(arguments[3].window)
        return by_definition(*arguments)

    scoring.use_kernel(model, replace(BY_DEFINITION, attend=noted))
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
            scorer.kernel = replace(BY_DEFINITION, attend=noted)
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


# The choice ---------------------------------------------------------------------------------------


def broken(change: Callable[[Segments, Window], tuple[Segments, Window]]) -> Kernel:
    def wrong(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        segments, window = change(call.segments, call.window)
        return by_definition(q, k, v, replace(call, segments=segments, window=window))

    return replace(BY_DEFINITION, attend=wrong)


def one_more(window: Window) -> Window:
    return window[0] if window[0] < 0 else window[0] + 1, window[1]


BROKEN = {
    "a key too many before": broken(lambda s, w: (s, one_more(w))),
    "no causality": broken(lambda s, w: (s, EVERYTHING)),
    "segments that see each other": broken(
        lambda s, w: (
            Segments.of([int(s.query_ends[-1])], [int(s.key_ends[-1])]),
            w,
        )
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_definition_passes_the_check_in_both_precisions(dtype: torch.dtype) -> None:
    assert kernel_problem(BY_DEFINITION, 4, 2, 16, dtype, CPU) is None


def test_the_check_has_gradients_in_an_evaluation_too() -> None:
    with torch.inference_mode():
        assert kernel_problem(BY_DEFINITION, 4, 2, 16, torch.float32, CPU) is None


@pytest.mark.parametrize("name", BROKEN)
def test_a_kernel_that_sees_other_keys_is_refused_in_bfloat16_too(name: str) -> None:
    problem = kernel_problem(BROKEN[name], 4, 2, 16, torch.bfloat16, CPU)
    assert problem is not None
    assert "its attention differs" in problem


def test_a_kernel_with_a_wrong_gradient_is_refused() -> None:
    def wrong(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return by_definition(q, k.detach(), v, call) + 0 * k.sum()

    problem = kernel_problem(replace(BY_DEFINITION, attend=wrong), 4, 2, 16, torch.float32, CPU)
    assert problem is not None
    assert "gradient differs" in problem


def test_the_first_kernel_that_is_right_is_taken_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = modernbert()
    kernels = (
        Kernel("absent", by_definition, "no_such_package", low_only=False),
        Kernel("narrow", by_definition, "torch"),
        replace(BROKEN["no causality"], name="wrong"),
        replace(BY_DEFINITION, name="right"),
    )
    monkeypatch.setattr(varlen, "KERNELS", kernels)
    with caplog.at_level(logging.INFO, varlen.__name__):
        assert choose_kernel(model, CPU) is kernels[-1]
    (line,) = caplog.messages
    assert line.startswith("Attention in segments: right (absent: no_such_package is not installed")
    assert "narrow: it does not compute in torch.float32; wrong: with the window (-1, 0)" in line
    model.config.attention_dropout = 0.1
    assert choose_kernel(model, CPU) is None


def test_a_kernel_of_16_bits_is_the_definition_in_float32() -> None:
    """So a model is compared in float32 through the segments that the kernel will get."""

    def must_not_be_called(*_: Any) -> Tensor:
        raise AssertionError("called in float32")

    narrow = Kernel("narrow", must_not_be_called, "torch")
    queries = [3, 2]
    q, k, v = (each.transpose(0, 1)[None] for each in random_attention(queries, queries))
    segments = Segments.of(queries, queries)
    found, _ = attend(narrow, segments, CAUSAL, q, k, v, scaling=0.3)
    expected, _ = attend(BY_DEFINITION, segments, CAUSAL, q, k, v, scaling=0.3)
    assert torch.equal(found, expected)
    with pytest.raises(AssertionError, match="called"):
        attend(narrow, segments, CAUSAL, q.bfloat16(), k.bfloat16(), v.bfloat16(), scaling=0.3)


def test_what_no_kernel_has_is_refused_by_name() -> None:
    q, k, v = (each.transpose(0, 1)[None] for each in random_attention([3], [3]))
    arguments = BY_DEFINITION, Segments.of([3], [3]), CAUSAL, q, k, v
    with pytest.raises(UnsupportedError, match="by definition has no softcap, dropout"):
        attend(*arguments, softcap=30.0, dropout=0.1)


def test_a_model_with_a_kernel_can_be_pickled() -> None:
    model = modernbert()
    for kernel in KERNELS:
        scoring.use_kernel(model, kernel)
        assert scoring.kernel_of(pickle.loads(pickle.dumps(model))) == kernel


# Where there is a GPU -----------------------------------------------------------------------------

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@on_gpu
@pytest.mark.parametrize("kernel", KERNELS, ids=[kernel.name for kernel in KERNELS])
@pytest.mark.parametrize("sizes", [(32, 8, 64), (12, 12, 64)], ids=["Llama-3.2-1B", "ModernBERT"])
def test_a_kernel_computes_the_definition_on_a_gpu(
    kernel: Kernel, sizes: tuple[int, int, int]
) -> None:
    if not kernel.installed:
        pytest.skip(f"{kernel.package} is not installed")
    assert kernel_problem(kernel, *sizes, torch.bfloat16, torch.device("cuda")) is None


@on_gpu
@pytest.mark.parametrize("kernel", KERNELS, ids=[kernel.name for kernel in KERNELS])
def test_pairs_score_on_a_gpu_in_bfloat16_as_in_float32(kernel: Kernel) -> None:
    if not kernel.installed:
        pytest.skip(f"{kernel.package} is not installed")
    model = modernbert().cuda()
    lengths = torch.tensor([31, 4, 17, 4, 60, 1])
    ids = torch.randint(3, 60, (6, 60), generator=torch.Generator().manual_seed(1)).cuda()
    inputs, everything = {"input_ids": ids}, torch.arange(6)
    with torch.no_grad():
        expected = scoring.grouped_scores(model, inputs, lengths, everything)
        scoring.use_kernel(model, kernel)
        with torch.autocast("cuda", torch.bfloat16):
            found = scoring.packed_scores(model, inputs, lengths, everything)
    error = (found - expected).abs().max()
    assert error < 0.1 * expected.std() + 3e-2 * math.sqrt(float(expected.square().mean()))
