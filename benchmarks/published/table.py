"""What a published table brings: problems by formula, columns, rows and their source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pl_pointwise.tasks.family.family import Family

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Judged:
    """Answers in float64, row by row, and what is known of the best ones."""

    objective: Tensor  # (B,)
    best: Tensor  # (B,)
    inequality: Tensor  # (B, K), (g)₊
    equality: Tensor  # (B, E), |Ay − x|


@dataclass(frozen=True)
class Table:
    """A published table.

    Attributes:
        name: of its rows.
        formula: its numbers, as an ``.npz`` file of one's own problems has them
            (docs/family.md); instances train in their order, the last two twelfths are not used.
        columns: what the table shows of answers.
        published: rows of others: a name, and their columns.
        source: of those rows: how they were run, as far as is said.
        file: where they stand.
        nonconvex: pᵀ sin y in the objective.
        epochs: of every method here.
        batch: instances a step.
        shown: the columns that docs/family.md has.
        judged: (N, E), the instances that are judged; None: the last twelfth.
    """

    name: str
    formula: Callable[[], Arrays]
    columns: Callable[[Judged], dict[str, float]]
    published: Mapping[str, Mapping[str, float]]
    source: str
    file: str
    shown: tuple[str, ...]
    nonconvex: bool = False
    epochs: int = 150
    batch: int = 200
    judged: Callable[[], np.ndarray] | None = None
    weights: tuple[float, ...] = field(default=(1, 3, 10, 30, 100, 300, 1000))

    def family(self, folder: Path) -> Family:
        """The problems as a file, and the family that reads it."""
        path = folder / f"{self.name}.npz"
        if not path.exists():
            np.savez(path, **self.formula())
        return Family.of_file(path, nonconvex=self.nonconvex)


def geometric_mean(values: Tensor) -> float:
    """As SnareNet's code has it: of values below 1e-16, 1e-16."""
    return float(values.clamp(min=1e-16).log().mean().exp())


def snarenet_columns(judged: Judged) -> dict[str, float]:
    """Gaps are objective − optimum, absolute; maxima over instances and constraints."""
    gap = judged.objective - judged.best
    return {
        "gap, geometric mean": geometric_mean(gap),
        "gap, largest": float(gap.max()),
        "inequality, largest": float(judged.inequality.max()),
        "equality, largest": float(judged.equality.max()),
    }


def common_columns(judged: Judged) -> dict[str, float]:
    """What every table has beside its own columns."""
    gap = judged.objective - judged.best
    beyond = judged.inequality.amax(1) > 1e-6
    return {
        "below the optimum": float((gap < -1e-6).sum()),
        "infeasible": float(beyond.sum()),
        "worst, mean": float(judged.inequality.amax(1).mean()),
        "gap, % of the mean": 100 * float(gap.mean() / judged.best.mean().abs()),
    }


SIZES = (100, 50, 50)
"""Variables, inequalities and equations of both of SnareNet's tables and of HardNet's."""


def sine(
    seed: int, instances: int = 10_000, sizes: tuple[int, int, int] = SIZES
) -> Arrays:
    """½yᵀQy + pᵀ sin y s.t. Cy = x, Ay ≤ b: HardNet's order of draws, another than DC3's."""
    variables, count, equations = sizes
    draw = np.random.RandomState(seed)
    square = draw.random_sample(variables)
    linear = draw.random_sample(variables)
    below = draw.normal(0, 1, (count, variables))
    equal = draw.normal(0, 1, (equations, variables))
    bound = np.abs(below @ np.linalg.pinv(equal)).sum(1)
    x = draw.uniform(-1, 1, (instances, equations))
    return {"Q": square, "p": linear, "A": equal, "G": below, "h": bound, "X": x}


def to_tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float64))
