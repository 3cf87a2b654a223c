"""What a task of the laboratory gives, and the layers of its networks.

Many members, a method with a seed each, are trained at once: every parameter has a leading
dimension M, and as no two members share a parameter, the gradient of the sum of their losses is
that of each. Shapes: M members, B samples of a batch, K columns of a constraint.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from pl_pointwise import Constraint

Parameters = dict[str, Tensor]
"""Of one member as a task starts it, (…); of all, (M, …)."""
Terms = tuple[Tensor, dict[str, Tensor]]
"""ℓ₀, (M, B), and of each constraint ℓ_k, (M, B) or (M, B, K): not yet violations."""


@dataclass
class Task:
    """Minimise mean ℓ₀ under a bound on each sample, or on the mean of each group.

    The rows of a task are its samples, from 0, and after them the unseen ones.

    Args:
        samples: N, of the training set.
        start: the parameters of a member; of a convex task the same for every seed.
        terms: ℓ₀ and ℓ_k of the rows ``index`` (M, B).
        constraints: by name.
        scale: what a violation is divided by where it is judged, one number or one of each group
            (G,); 1 where left out.
        slack: by how much a value may miss its bound and count as met, in its scale.
        membership: bool (rows,) by "objective" or constraint; left out: all rows.
        groups: (rows,), from 0: the mean of each group is what must meet the bounds.
        counted: bool (rows,), which rows are judged, where others are known to be wrong.
        unseen: the rows that are held out.
        error: of each member, (M,), in place of the mean of ℓ₀ where that says little.
        optimum: by a solver the least mean ℓ₀ that meets all bounds, on the training set.
        grid: weights by constraint, tried beside one weight for all, where units differ.
        batch: B; ten steps an epoch where it is left out.
        rate: of Adam at the start; it falls to 0 as a cosine.
        lengths: epochs.
    """

    samples: int
    start: Callable[[torch.Generator], Parameters]
    terms: Callable[[Parameters, Tensor], Terms]
    constraints: dict[str, Constraint]
    slack: dict[str, float]
    scale: dict[str, float | Tensor] = field(default_factory=dict)
    membership: dict[str, Tensor] = field(default_factory=dict)
    groups: Tensor | None = None
    counted: Tensor | None = None
    unseen: range = range(0)
    error: Callable[[Parameters], Tensor] | None = None
    optimum: Callable[[], float] | None = None
    grid: tuple[dict[str, float], ...] = ()
    batch: int | None = None
    rate: float = 0.01
    lengths: tuple[int, ...] = (1, 10, 100)

    @property
    def batch_size(self) -> int:
        return self.batch or max(1, self.samples // 10)

    @cached_property
    def least(self) -> float | None:
        """The objective at the constrained optimum; None where it is not known."""
        return None if self.optimum is None else self.optimum()

    def applies(self, name: str, index: Tensor) -> Tensor | None:
        """Bool as ``index``: to which rows a term applies; None: to all."""
        table = self.membership.get(name)
        return None if table is None else table[index]

    def residuals(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """v of each constraint, (M, B, K); of an equality ℓ − c with its sign."""
        found = {}
        for name, value in values.items():
            constraint = self.constraints[name]
            violation = constraint.violation(value)
            if constraint.equals is not None:
                violation = value - constraint.equals
            found[name] = violation if violation.dim() == 3 else violation[..., None]
        return found


# Networks ----------------------------------------------------------------------------------------


def layers(generator: torch.Generator, *widths: int) -> Parameters:
    """Weights and biases of a network, drawn as torch.nn.Linear draws them."""
    found = {}
    for place, (inputs, outputs) in enumerate(pairwise(widths)):
        reach = 1 / math.sqrt(inputs)
        for name, shape in (("w", (inputs, outputs)), ("b", (outputs,))):
            found[f"{name}{place}"] = reach * (
                2 * torch.rand(shape, generator=generator) - 1
            )
    return found


def zeros(**shapes: tuple[int, ...]) -> Callable[[torch.Generator], Parameters]:
    """Every member starts at 0."""
    return lambda generator: {
        name: torch.zeros(shape) for name, shape in shapes.items()
    }


def affine(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """x (M, B, in) by weight (M, in, out) and bias (M, out)."""
    return torch.baddbmm(bias[:, None], x, weight)


def network(
    parameters: Parameters, x: Tensor, between: Callable[[Tensor], Tensor] = torch.tanh
) -> Tensor:
    """(M, B, in) ↦ (M, B, out) by the parameters that :func:`layers` drew."""
    depth = sum(name.startswith("w") for name in parameters)
    for place in range(depth):
        x = affine(parameters[f"w{place}"], parameters[f"b{place}"], x)
        x = between(x) if place < depth - 1 else x
    return x


def slope(values: Tensor, at: Tensor) -> Tensor:
    """The gradient of each value in its own point: (M, B), (M, B, D) ↦ (M, B, D)."""
    return torch.autograd.grad(values.sum(), at, create_graph=True)[0]
