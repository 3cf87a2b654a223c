"""The quick dropout is a dropout: its probability, expectation, gradient and random state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pl_pointwise.tasks.common.dropout import (
    QuickDropout,
    RedrawnDropout,
    kept_and_scaled,
    use_quick_dropout,
)


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_the_share_dropped_is_p_and_the_mean_stays(p: float) -> None:
    """Within five standard errors of 1.2 million draws, far less than a step of an 8-bit draw."""
    torch.manual_seed(0)
    count = 1_200_001  # not a multiple of four
    factors = kept_and_scaled(torch.empty(count), p)
    share = float((factors == 0).double().mean())
    assert abs(share - p) < 5 * (p * (1 - p) / count) ** 0.5
    assert abs(float(factors.double().mean()) - 1.0) < 5 * (p / (1 - p) / count) ** 0.5
    assert factors.unique().numel() == 2
    assert factors.max().item() == pytest.approx(1 / (1 - p), rel=1e-4)


def test_neighbours_are_independent() -> None:
    """Four elements share one number of the generator: no pair of places may go together."""
    torch.manual_seed(0)
    kept = (kept_and_scaled(torch.empty(400_000), 0.3) > 0).double().view(-1, 4)
    correlation = torch.corrcoef(kept.T) - torch.eye(4)
    assert correlation.abs().max() < 5 / len(kept) ** 0.5
    following = torch.corrcoef(torch.stack([kept[:-1, 3], kept[1:, 0]]))[0, 1]
    assert abs(following) < 5 / len(kept) ** 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_gradient_is_the_factor(dtype: torch.dtype) -> None:
    values = torch.full((7, 5), 2.0, dtype=dtype, requires_grad=True)
    dropped = QuickDropout(0.4)(values)
    dropped.sum().backward()
    assert dropped.dtype == dtype
    assert values.grad is not None
    torch.testing.assert_close(values.grad * 2, dropped.detach())
    assert {0.0} < {round(v, 1) for v in dropped.flatten().tolist()} == {0.0, 3.3}


def test_the_same_random_state_gives_the_same_dropout() -> None:
    """So that a replayed or resumed step sees what the first one saw."""
    values, dropout = torch.ones(1001), QuickDropout(0.5)
    torch.manual_seed(3)
    first, second = dropout(values), dropout(values)
    torch.manual_seed(3)
    assert torch.equal(dropout(values), first)
    assert not torch.equal(first, second)


def test_a_models_dropouts_are_replaced_and_its_state_is_not() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Dropout(0.3)), nn.Dropout(0.0))
    names = list(model.state_dict())
    model[1].eval()
    use_quick_dropout(model)
    inner, outer = model[1][0], model[2]
    assert isinstance(inner, QuickDropout)
    assert isinstance(outer, QuickDropout)
    assert (inner.p, outer.p, inner.training, outer.training) == (0.3, 0.0, False, True)
    assert list(model.state_dict()) == names
    values = torch.randn(50)
    assert torch.equal(inner(values), values)
    assert torch.equal(outer(values), values)
    assert (inner.train()(values) == 0).any()


def test_redrawn_factors_are_those_of_the_forward_pass() -> None:
    values = torch.randn(37, 11, requires_grad=True)
    layer = RedrawnDropout(0.3)
    first, second = layer(values), layer(values)
    assert not torch.equal(first == 0, second == 0)
    first.backward(torch.full_like(first, 2.0))
    assert values.grad is not None
    torch.testing.assert_close(values.grad, 2 * first / values)
    assert 0.2 < (first == 0).double().mean() < 0.4


def test_redrawn_dropout_follows_the_seed_and_keeps_no_tensor() -> None:
    values = torch.randn(50, 8, requires_grad=True)
    layer = RedrawnDropout(0.5)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        torch.manual_seed(3)
        first = layer(values)
    torch.manual_seed(3)
    assert torch.equal(layer(values), first)
    assert not kept
    assert torch.equal(layer.eval()(values), values)
