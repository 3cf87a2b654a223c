"""What a correction leaves violated, what it leaves unchanged, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pl_pointwise.correction import Corrected, projector

EQUAL = torch.tensor([[1.0, 1.0, 1.0, 0.0], [0.0, 1.0, -1.0, 2.0]])
NULL = torch.linalg.svd(EQUAL)[2][2:].T


class Answer(nn.Module):
    """The identity: a model whose answers are what a test gives it."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def inside(y: Tensor, x: Tensor) -> Tensor:
    """A ball, and a half-space that holds a part of it."""
    return torch.stack([y.square().sum(1) - 1, y[:, 0] - 0.2], 1)


def answers() -> Tensor:
    return 3 * torch.randn(50, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "basis", [NULL, NULL @ torch.tensor([[2.0, 1.0], [0.0, 3.0]]), NULL @ NULL.T]
)
@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, torch.enable_grad]
)
def test_nothing_is_violated_and_the_equalities_stay(basis: Tensor, mode: type) -> None:
    y = 0.3 * answers() @ NULL @ NULL.T
    assert (inside(y, y) > 0.1).any(0).all()
    with mode():
        found = Corrected(Answer(), inside, within=basis)(y.clone())
    assert inside(found, y).max() <= 1e-4
    assert not found.requires_grad
    torch.testing.assert_close(found @ EQUAL.T, y @ EQUAL.T, rtol=0, atol=1e-6)


def test_a_half_space_is_met_by_the_nearest_point() -> None:
    y, normal = answers(), torch.tensor([[1.0, 2.0, 0.0, -1.0]])
    found = Corrected(Answer(), lambda y, x: y @ normal.T - 0.5, steps=1)(y)
    excess = (y @ normal.T - 0.5).clamp(min=0)
    torch.testing.assert_close(found, y - excess * normal / normal.square().sum())


def test_what_is_within_the_tolerance_is_left_alone_and_nothing_gets_worse() -> None:
    y = answers()

    # No y meets it; far steps make it worse.
    def unreachable(y: Tensor, x: Tensor) -> Tensor:
        return torch.stack([y[:, 0].sin() + 1.5, 0.1 - y[:, 0]], 1)

    found = Corrected(Answer(), unreachable, steps=7)(y)
    assert (unreachable(found, y).amax(1) <= unreachable(y, y).amax(1)).all()
    assert (found != y).any()
    kept = inside(y, y).amax(1) <= 5.0
    assert (Corrected(Answer(), inside, tolerance=5.0)(y)[kept] == y[kept]).all()
    assert (Corrected(Answer(), inside, steps=0)(y) == y).all()


def test_its_state_has_the_directions() -> None:
    one = Corrected(nn.Linear(4, 4), inside, within=NULL)
    other = Corrected(nn.Linear(4, 4), inside, within=torch.eye(4))
    other.load_state_dict(one.state_dict())
    torch.testing.assert_close(other.within, NULL @ NULL.T)
    x = answers()
    torch.testing.assert_close(one(x), other(x))


@pytest.mark.parametrize("wrong", [NULL.T, torch.ones(4)])
def test_other_directions_are_refused(wrong: Tensor) -> None:
    with pytest.raises(ValueError, match="within is"):
        projector(wrong)
