"""The gradient that is computed with the statistics, beside autograd's of all logits at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pl_pointwise.tasks.language_model.likelihood import vocabulary
from pl_pointwise.tasks.language_model.likelihood.vocabulary import (
    TokenStatistics,
    VocabularyHead,
    chunked_token_statistics,
    decoder_of,
    log_softmax,
    token_statistics,
)
from tests.tasks.conftest import build_model

VOCABULARY = 97
TOKENS = 11
CHUNK = 3 * VOCABULARY
"""Four chunks, the last one shorter."""


def frozen(architecture: str = "llama") -> PreTrainedModel:
    return build_model(architecture).double().requires_grad_(False)


def inputs(model: PreTrainedModel) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of the policy, targets, hidden states of the reference."""
    generator = torch.Generator().manual_seed(3)
    size = (TOKENS, model.config.hidden_size)
    hidden, reference = (
        torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return hidden.requires_grad_(), targets, reference


def total(statistics: TokenStatistics, parts: str) -> Tensor:
    """A sum with another weight for every token, of ℓ, KL, leads, or several of them."""
    weights = torch.linspace(-1, 2, 2 * TOKENS, dtype=torch.float64)
    log_likelihood, divergence, _, lead = statistics
    result = torch.zeros((), dtype=torch.float64)
    if "likelihood" in parts:
        result = result + (weights[:TOKENS] * log_likelihood).sum()
    if "divergence" in parts:
        assert divergence is not None
        result = result + (weights[TOKENS:] * divergence).sum()
    if "lead" in parts:
        assert lead is not None
        result = result + (weights[:TOKENS].flip(0) * lead).sum()
    return result


@pytest.mark.parametrize(
    ("architecture", "parts"),
    [
        ("llama", "likelihood"),
        ("llama", "divergence"),
        ("llama", "lead"),
        ("gemma2", "likelihood, divergence and lead"),
        *(
            (name, "likelihood and divergence")
            for name in ("gemma2", "granite", "cohere")
        ),
    ],
)
def test_the_gradient_of_chunks_is_that_of_all_logits(
    architecture: str, parts: str
) -> None:
    """In float64; with logits soft-capped and scaled by the model too."""
    model = frozen(architecture)
    hidden, targets, reference = inputs(model)
    head = VocabularyHead(model)
    leads = "lead" in parts
    known = log_softmax(head(reference)).detach()
    expected = token_statistics(log_softmax(head(hidden)), targets, known, leads)
    (gradient,) = torch.autograd.grad(total(expected, parts), hidden)
    assert gradient.norm() > 0.1

    found = chunked_token_statistics(
        head, hidden, targets, reference, chunk_elements=CHUNK, leads=leads
    )
    assert (found[3] is None) == (not leads)
    for mine, other in zip(found[: 3 + leads], expected, strict=False):
        assert mine is not None
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    (actual,) = torch.autograd.grad(total(found, parts), hidden)
    torch.testing.assert_close(actual, gradient, rtol=1e-12, atol=1e-12)
    assert not found[2].requires_grad  # type: ignore[union-attr]


def counted_products(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A list that grows by one with every matrix product of a head."""
    products: list[None] = []
    multiply = vocabulary._multiply

    def counted(*args: object) -> Tensor:
        products.append(None)
        return multiply(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(vocabulary, "_multiply", counted)
    return products


@pytest.mark.parametrize("trained", [None, "head", "decoder", "nothing"])
def test_no_product_is_computed_twice_under_a_frozen_head(
    trained: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk takes its logits, the reference's, and the gradients of ℓ and of KL.

    Nothing: as in the first step of a module whose trained weights lie elsewhere, logits alone.
    """
    model = frozen()
    if trained == "head":
        model.get_output_embeddings().requires_grad_()
    if trained == "decoder":
        decoder_of(model).requires_grad_()
    products = counted_products(monkeypatch)
    hidden, targets, reference = inputs(model)
    hidden.requires_grad_(trained != "nothing")
    head = VocabularyHead(model)
    found = chunked_token_statistics(
        head, hidden, targets, reference, chunk_elements=CHUNK
    )
    forward = len(products)
    if trained == "nothing":
        assert forward == 8
        assert not found[0].requires_grad
        return
    total(found, "likelihood and divergence").backward()
    backward = len(products) - forward
    # Its gradient needs what comes in: computed again, and three products.
    if trained == "head":
        assert (forward, backward) == (8, 20 - 4)
        assert model.get_output_embeddings().weight.grad is not None
    else:
        assert (forward, backward) == (16, 0)


def test_low_precision_rounds_the_gradient_once() -> None:
    """bfloat16 hidden states, a float32 head: as near to float64 as one rounding allows."""
    model = frozen()
    hidden, targets, reference = inputs(model)
    low = hidden.detach().bfloat16()
    exact = low.double().requires_grad_()
    head = VocabularyHead(model)
    expected = token_statistics(
        log_softmax(head(exact)), targets, log_softmax(head(reference))
    )
    (gradient,) = torch.autograd.grad(
        total(expected, "likelihood and divergence"), exact
    )

    rounded = low.requires_grad_()
    head = VocabularyHead(model.float())
    found = chunked_token_statistics(
        head, rounded, targets, reference.float(), chunk_elements=CHUNK
    )
    (actual,) = torch.autograd.grad(total(found, "likelihood and divergence"), rounded)
    assert actual.dtype == torch.bfloat16
    error = (actual.double() - gradient).abs() / gradient.abs().clamp(min=1e-3)
    assert error.max() < 2**-8
