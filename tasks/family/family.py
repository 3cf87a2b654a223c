"""A network solves a family of problems: x ↦ y, cheap, and feasible for every x: docs/family.md.

    minimise ½ yᵀQy + pᵀy (or pᵀ sin y)   subject to   Ay = x,  Gy ≤ h

The data are those of Donti, Rolnick and Kolter, *DC3* (2021), by their formula.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from pl_pointwise import Constraint, Formulation, PointwiseDataModule, PointwiseModule, Training
from pl_pointwise.correction import Corrected
from pl_pointwise.errors import DataError, one_of
from pl_pointwise.evaluation import MeanBySample
from pl_pointwise.extras import needs
from pl_pointwise.model_card import write_card
from pl_pointwise.plain import from_plain

SEED = 17
BEYOND = 1e-3
"""A violation that counts in the metric ``beyond``."""
Equalities = Literal["completion", "loss"]
USAGE = """from pl_pointwise.tasks.family import Family, FamilyModule
from safetensors.torch import load_model
module = FamilyModule(None, Family(**{family}), correction={steps}, equalities="{equalities}")
load_model(module.solver, "model.safetensors")
y = module.solver.eval()(x)  # x: (B, {equations})"""


@dataclass(frozen=True)
class Family:
    """Which problems: their sizes, and whether the objective is that with a sine.

    The instances are drawn between A and G: another number of them is another family.
    """

    variables: int = 20
    equations: int = 10
    inequalities: int = 10
    instances: int = 1000
    nonconvex: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.equations < self.variables or self.inequalities < 1 or self.instances < 24:
            raise ValueError(f"{self}: give 0 < equations < variables, 1 inequality, 24 instances.")


@dataclass(frozen=True)
class Problems:
    """The numbers of a family, float64."""

    Q: Tensor  # (V,), a diagonal
    p: Tensor  # (V,)
    A: Tensor  # (E, V)
    G: Tensor  # (K, V)
    h: Tensor  # (K,)
    x: Tensor  # (N, E)
    plus: Tensor  # A⁺, (V, E)
    null: Tensor  # N, (V, V − E), orthonormal, AN = 0


@lru_cache
def problems(family: Family) -> Problems:
    """The family's numbers. With h every x has a feasible y: that without z."""
    size, draw = family, np.random.RandomState(SEED)
    square, linear = draw.random_sample(size.variables), draw.random_sample(size.variables)
    equal = draw.normal(0, 1, (size.equations, size.variables))
    x = draw.uniform(-1, 1, (size.instances, size.equations))
    below = draw.normal(0, 1, (size.inequalities, size.variables))
    plus = np.linalg.pinv(equal)
    null = np.linalg.svd(equal)[2][size.equations :].T.copy()
    bound = np.abs(below @ plus).sum(1)
    return Problems(*map(torch.from_numpy, (square, linear, equal, below, bound, x, plus, null)))


@lru_cache
def optimum(family: Family, tolerance: float = 1e-6, steps: int = 20_000) -> Tensor:
    """(M,) least objective of the instances that do not train, by ADMM in z: y = A⁺x + Nz.

    Until no primal or dual residual is above the tolerance. With the sine, which is replaced by its
    tangent and a parabola above it in each step, a stationary point and not the least for sure.
    """
    of = problems(family)
    start = of.x[split_of(family)["train"].stop :] @ of.plus.T
    curved = of.Q + of.p if family.nonconvex else of.Q
    hessian, under = of.null.T * curved @ of.null, of.G @ of.null
    bound = of.h - start @ of.G.T
    inverse = torch.linalg.inv(hessian + under.T @ under)
    y, s, u = start, bound.clamp(max=0), torch.zeros_like(bound)
    for _ in range(steps):
        slope = y * of.Q + of.p * (y.cos() if family.nonconvex else 1)
        z = (((y - start) * curved - slope) @ of.null + (s - u) @ under) @ inverse
        values, before = z @ under.T, (s, y)
        y, s = start + z @ of.null.T, torch.minimum(values + u, bound)
        u = u + values - s
        moved = ((s - before[0]) @ under).abs().max(), (y - before[1]).abs().max()
        if max((values - s).abs().max(), *moved) < tolerance:
            return y.square() @ of.Q / 2 + (y.sin() if family.nonconvex else y) @ of.p
    raise DataError(f"The optimum of {family} was not found in {steps} steps: take another size.")


def split_of(family: Family) -> dict[str, slice]:
    """The instances of each part: the last two twelfths are held out."""
    held, count = family.instances // 12, family.instances
    return {
        "train": slice(0, count - 2 * held),
        "val": slice(count - 2 * held, count - held),
        "test": slice(count - held, count),
    }


class Proxy(nn.Module):
    """The network: x (B, E) ↦ y (B, V); by completion y = A⁺x + N·z(x), which holds Ay = x."""

    Q: Tensor
    p: Tensor
    A: Tensor
    G: Tensor
    h: Tensor
    plus: Tensor
    null: Tensor

    def __init__(self, family: Family, equalities: Equalities, width: int = 200) -> None:
        super().__init__()
        self.nonconvex, self.completes = family.nonconvex, equalities == "completion"
        of = problems(family)
        for name in ("Q", "p", "A", "G", "h", "plus", "null"):
            self.register_buffer(name, getattr(of, name).float())
        outputs = family.variables - (family.equations if self.completes else 0)
        self.network = nn.Sequential(
            nn.Linear(family.equations, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.network(x)
        return x @ self.plus.T + z @ self.null.T if self.completes else z

    def objective(self, y: Tensor) -> Tensor:  # (B,)
        return y.square() @ self.Q / 2 + (y.sin() if self.nonconvex else y) @ self.p

    def inequalities(self, y: Tensor, x: Tensor) -> Tensor:  # (B, K)
        return y @ self.G.T - self.h

    def equalities(self, y: Tensor, x: Tensor) -> Tensor:  # (B, E)
        return y @ self.A.T - x


class FamilyModule(PointwiseModule):
    """A network that solves every problem of a family.

    Args:
        formulation: how the constraints are enforced.
        family: which problems; the data's too.
        equalities: "completion": held by the network's last layer; "loss": a second constraint.
        margin: by how much more than needed an inequality is to hold in training.
        correction: steps of :class:`~pl_pointwise.correction.Corrected` in evaluation.
        training: optimizer and schedule.
    """

    def __init__(
        self,
        formulation: Formulation | None,
        family: Family = Family(),
        equalities: Equalities = "completion",
        margin: float = 0.0,
        correction: int = 0,
        training: Training | None = None,
    ) -> None:
        one_of("equalities", equalities, ("completion", "loss"))
        exact = {"equalities": Constraint(equals=0.0)} if equalities == "loss" else {}
        super().__init__(
            formulation=formulation,
            constraints={"inequalities": Constraint(at_most=-margin), **exact},
            evaluation_constraints={"inequalities": Constraint(at_most=0.0)},
            training=training or Training(),
        )
        self.family, self.equalities = from_plain(Family, family), equalities
        proxy = Proxy(self.family, equalities)
        self.solver = Corrected(proxy, proxy.inequalities, correction, within=proxy.null)

    @property
    def proxy(self) -> Proxy:
        """The network without the correction."""
        found = self.solver.model
        assert isinstance(found, Proxy)
        return found

    def setup(self, stage: str) -> None:
        given = getattr(self.trainer.datamodule, "family", self.family)
        if given != self.family:
            raise DataError(
                f"The model is of {self.family}, the data are of {given}: set model.family and "
                "data.family alike."
            )

    def forward(self, batch: Any) -> Tensor:
        return (self.proxy if self.training else self.solver)(batch["x"])

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:  # (B,)
        return self.proxy.objective(outputs)

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        found = {"inequalities": self.proxy.inequalities(outputs, batch["x"])}  # (B, K)
        if self.equalities == "loss":
            found["equalities"] = self.proxy.equalities(outputs, batch["x"])  # (B, E)
        return found

    def evaluation_metrics(self) -> dict[str, Metric]:
        names = ("gap", "worst", "beyond", "equality")
        return {name: MeanBySample(higher_is_better=False) for name in names}

    def update_evaluation_metrics(
        self, metrics: dict[str, Metric], outputs: Tensor, batch: Any, real: Tensor, stage: str
    ) -> None:
        index, proxy = batch["index"].where(real.cpu(), -1), self.proxy
        worst = proxy.inequalities(outputs, batch["x"]).amax(1).clamp(min=0)
        metrics["worst"].update(index, worst)
        metrics["beyond"].update(index, (worst > BEYOND).float())
        metrics["equality"].update(index, proxy.equalities(outputs, batch["x"]).abs().mean(1))
        if "optimum" in batch:
            best = batch["optimum"]
            metrics["gap"].update(index, (proxy.objective(outputs) - best) / best.abs())

    def export(self, path: str | Path) -> Path:
        with needs("language", "An export"):
            from safetensors.torch import save_model
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        save_model(self.solver, str(folder / "model.safetensors"))
        usage = USAGE.format(
            family=asdict(self.family),
            steps=self.solver.steps,
            equalities=self.equalities,
            equations=self.family.equations,
        )
        write_card(
            self,
            folder,
            library_name="pytorch",
            pipeline_tag="other",
            base_model=None,
            usage=usage,
        )
        return folder


class FamilyDataModule(PointwiseDataModule):
    """The instances x, uniform in [−1, 1]; those held out with their optimum.

    Args:
        family: which problems; the model's too.
        options: of `PointwiseDataModule`.
    """

    def __init__(self, family: Family = Family(), **options: Any) -> None:
        super().__init__(**options)
        self.family = from_plain(Family, family)

    def setup(self, stage: str) -> None:
        self.datasets = {split: list(self._rows(split)) for split in split_of(self.family)}

    def _rows(self, split: str) -> Iterator[dict[str, Tensor]]:
        part, of = split_of(self.family), problems(self.family)
        if split == "train":
            yield from ({"x": x} for x in of.x[part[split]].float())
            return
        first = part["train"].stop
        best = optimum(self.family)[part[split].start - first : part[split].stop - first]
        for x, least in zip(of.x[part[split]].float(), best.float(), strict=True):
            yield {"x": x, "optimum": least}
