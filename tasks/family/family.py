"""A network solves a family of problems: x ↦ y, cheap, and feasible for every x: docs/family.md.

    minimise ½ yᵀQy + pᵀy (or pᵀ sin y)   subject to   Ay = x,  Gy ≤ h

The data are those of Donti, Rolnick and Kolter, *DC3* (2021), by their formula.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from pl_pointwise import Constraint, Formulation, PointwiseDataModule, PointwiseModule, Training
from pl_pointwise.correction import Corrected
from pl_pointwise.data import SPLITS
from pl_pointwise.errors import DataError, one_of
from pl_pointwise.evaluation import MeanBySample
from pl_pointwise.extras import needs
from pl_pointwise.model_card import write_card
from pl_pointwise.plain import from_plain

SEED = 17
BEYOND = 1e-3  # A violation that counts in the metric of that name.
Equalities = Literal["completion", "loss"]
USAGE = """from pl_pointwise.tasks.family import Family, FamilyModule
from safetensors.torch import load_model
module = FamilyModule(None, Family(**{family}), equalities="{equalities}", correction={correction})
load_model(module.solver, "model.safetensors")
y = module.solver(x)  # x: (B, equations)"""


@dataclass(frozen=True)
class Family:
    """Which problems. G is drawn after the instances: another number of them is another family."""

    variables: int = 20  #: V
    equations: int = 10  #: E < V
    inequalities: int = 10  #: K
    instances: int = 1000  #: N, at least 24
    nonconvex: bool = False  #: pᵀ sin y in the objective

    def __post_init__(self) -> None:
        if not 0 < self.equations < self.variables or self.inequalities < 1 or self.instances < 24:
            raise ValueError(f"{self}: give 0 < equations < variables, 1 inequality, 24 instances.")


class Problems(NamedTuple):
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
    variables, draw = family.variables, np.random.RandomState(SEED)
    square, linear = draw.random_sample(variables), draw.random_sample(variables)
    equal = draw.normal(0, 1, (family.equations, variables))
    x = draw.uniform(-1, 1, (family.instances, family.equations))
    below = draw.normal(0, 1, (family.inequalities, variables))
    plus, null = np.linalg.pinv(equal), np.linalg.svd(equal)[2][family.equations :].T.copy()
    found = square, linear, equal, below, np.abs(below @ plus).sum(1), x, plus, null
    return Problems(*map(torch.from_numpy, found))


def cost(y: Tensor, Q: Tensor, p: Tensor, nonconvex: bool) -> Tensor:  # noqa: N803
    """½ yᵀQy + pᵀy, or pᵀ sin y: (B, V) ↦ (B,)."""
    return y.square() @ Q / 2 + (y.sin() if nonconvex else y) @ p


@lru_cache
def optimum(family: Family, tolerance: float = 1e-6, steps: int = 20_000) -> Tensor:
    """(N,) least objective, by ADMM in z: y = A⁺x + Nz; NaN of the instances that train.

    Until no primal or dual residual is above the tolerance. With the sine, which is replaced by its
    tangent and a parabola above it in each step, a stationary point and not the least for sure.
    """
    of, trained = problems(family), split_of(family)["train"].stop
    start = of.x[trained:] @ of.plus.T
    curved = of.Q + of.p if family.nonconvex else of.Q
    hessian, under = of.null.T * curved @ of.null, of.G @ of.null
    bound = of.h - start @ of.G.T
    rho = 1 / family.variables  # As long as the rows of GN are, it weighs like Q.
    inverse = torch.linalg.inv(hessian + rho * under.T @ under)
    y, s, u = start, bound.clamp(max=0), torch.zeros_like(bound)
    for _ in range(steps):
        slope = y * of.Q + of.p * (y.cos() if family.nonconvex else 1)
        z = (((y - start) * curved - slope) @ of.null + rho * (s - u) @ under) @ inverse
        values, before = z @ under.T, (s, y)
        y, s = start + z @ of.null.T, torch.minimum(values + u, bound)
        u = u + values - s
        moved = ((s - before[0]) @ under).abs().max(), (y - before[1]).abs().max()
        if max((values - s).abs().max(), *moved) < tolerance:
            least = cost(y, of.Q, of.p, family.nonconvex)
            return torch.cat([torch.full((trained,), torch.nan), least])
    raise DataError(f"The optimum of {family} was not found in {steps} steps: take another size.")


def split_of(family: Family) -> dict[str, slice]:
    """The instances of each part: the last two twelfths are held out."""
    held, count = family.instances // 12, family.instances
    cuts = (0, count - 2 * held, count - held, count)
    return {name: slice(*cuts[i : i + 2]) for i, name in enumerate(SPLITS)}


class Proxy(nn.Module):
    """The network: x (B, E) ↦ y (B, V); by completion y = A⁺x + N·z(x), which holds Ay = x."""

    def __init__(self, family: Family, equalities: Equalities, width: int = 200) -> None:
        super().__init__()
        self.nonconvex, self.completes = family.nonconvex, equalities == "completion"
        of = Problems(*(nn.Buffer(each.float()) for each in problems(family)))
        self.Q, self.p, self.A, self.G, self.h, _, self.plus, self.null = of
        outputs = family.variables - (family.equations if self.completes else 0)
        sizes = (family.equations, width, width, outputs)
        layers = [[nn.Linear(*pair), nn.ReLU()] for pair in pairwise(sizes)]
        self.network = nn.Sequential(*[*chain(*layers)][:-1])

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.network(x)
        return x @ self.plus.T + z @ self.null.T if self.completes else z

    def objective(self, y: Tensor) -> Tensor:  # (B,)
        return cost(y, self.Q, self.p, self.nonconvex)

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

    shared_objective, shared_violation = "gap", "worst"

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
            constraints={"inequalities": Constraint(at_most=0.0 - margin), **exact},
            evaluation_constraints={"inequalities": Constraint(at_most=0.0)},
            training=training or Training(),
        )
        self.family, self.equalities = from_plain(Family, family), equalities
        proxy = Proxy(self.family, equalities)
        self.solver = Corrected(proxy, proxy.inequalities, correction, within=proxy.null)

    @property
    def proxy(self) -> Proxy:
        """The network without the correction."""
        return self.solver.model  # type: ignore[return-value]

    def setup(self, stage: str) -> None:
        given = getattr(self.trainer.datamodule, "family", self.family)
        if given != self.family:
            raise DataError(f"model.family is {self.family}, data.family {given}: set both alike.")

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
        return {name: MeanBySample() for name in ("gap", "worst", "beyond", "equality")}

    def update_evaluation_metrics(
        self, metrics: dict[str, Metric], outputs: Tensor, batch: Any, real: Tensor, stage: str
    ) -> None:
        index, proxy = batch["index"], self.proxy
        worst = proxy.inequalities(outputs, batch["x"]).amax(1).clamp(min=0)
        metrics["worst"].update(index, worst)
        metrics["beyond"].update(index, (worst > BEYOND).float())
        metrics["equality"].update(index, proxy.equalities(outputs, batch["x"]).abs().mean(1))
        if stage != "train":
            best = batch["optimum"]
            metrics["gap"].update(index, (proxy.objective(outputs) - best) / best.abs())

    def export(self, path: str | Path) -> Path:
        with needs("language", "An export"):
            from safetensors.torch import save_model
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        save_model(self.solver, str(folder / "model.safetensors"))
        kinds = {"library_name": "pytorch", "pipeline_tag": "other"}
        options = {"equalities": self.equalities, "correction": self.solver.steps}
        usage = USAGE.format(family=asdict(self.family), **options)
        write_card(self, folder, **kinds, base_model=None, usage=usage)
        return folder


class FamilyDataModule(PointwiseDataModule):
    """The instances x of ``family``, uniform in [−1, 1]; those held out with their optimum."""

    def __init__(self, family: Family = Family(), **options: Any) -> None:
        super().__init__(**options)
        self.family = from_plain(Family, family)

    def setup(self, stage: str) -> None:
        x, best = problems(self.family).x.float(), optimum(self.family).float()
        for split, part in split_of(self.family).items():
            pairs = zip(x[part], best[part], strict=True)
            self.datasets[split] = [{"x": each, "optimum": least} for each, least in pairs]
