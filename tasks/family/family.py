"""A network for a family of problems: x ↦ y, to be cheap, and feasible for each x: docs/family.md.

    minimise ½ yᵀQy + pᵀy (or pᵀ sin y)   subject to   Ay = x,  Gy ≤ h

The data are those of Donti, Rolnick and Kolter, *DC3* (2021), by their formula.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from pl_pointwise import (
    Constraint,
    Formulation,
    PointwiseDataModule,
    PointwiseModule,
    Training,
)
from pl_pointwise.bounds import (
    Certified,
    DualNetwork,
    QuadraticProgram,
    Stationary,
    train_bound,
)
from pl_pointwise.bounds.quadratic import diagonals_of, quadratic_terms
from pl_pointwise.correction import Corrected, newton_corrected
from pl_pointwise.data import SPLITS
from pl_pointwise.errors import DataError, one_of
from pl_pointwise.evaluation import MeanBySample
from pl_pointwise.extras import needs
from pl_pointwise.model_card import write_card
from pl_pointwise.plain import from_plain

log = logging.getLogger(__name__)

SEED = 17
ALLOWED = 1e-5  # A violation of a proved answer, which is in float32.
BEYOND = 1e-3  # A violation that counts in the metric of that name.
Equalities = Literal["completion", "loss"]
USAGE = """from pl_pointwise.tasks.family import Family, FamilyModule
from safetensors.torch import load_model
module = FamilyModule(None, Family(**{family}), equalities="{equalities}", correction={correction})
load_model(module.solver, "model.safetensors")
y = module.solver(x)  # x: (B, equations)"""


@dataclass(frozen=True)
class Family:
    """Which problems. G is drawn after the instances: another number of them is another family.

    .. versionadded:: 0.3.0

    >>> from pl_pointwise.tasks.family import Family
    >>> Family(variables=50, equations=20, inequalities=20).instances
    1000
    """

    variables: int = 20  #: V
    equations: int = 10  #: E < V
    inequalities: int = 10  #: K
    instances: int = 1000  #: N, at least 24
    nonconvex: bool = False  #: pᵀ sin y in the objective
    file: str = ""  #: of matrices, in place of DC3's formula: see ``Family.of_file``

    @classmethod
    def of_file(cls, path: str | Path, nonconvex: bool = False) -> Family:
        """The family whose numbers are in an ``.npz`` file, of one's own problems.

        Q (V,) of a diagonal or (V, V); p (V,); A (E, V); G (K, V); h (K,); X (N, E), an instance a
        row; and, where they are known, H (K, V) or (K, V, V) for ½yᵀHₖy + Gₖy ≤ hₖ, and optimum
        (N,). The last two twelfths of the instances are held out.

        Raises:
            DataError: no such file, an array that is missing, or sizes that disagree.
        """
        numbers = _numbers_of(str(path))
        equations, variables = numbers["A"].shape
        return cls(
            variables=variables,
            equations=equations,
            inequalities=len(numbers["h"]),
            instances=len(numbers["X"]),
            nonconvex=nonconvex,
            file=str(path),
        )

    def __post_init__(self) -> None:
        if (
            not 0 < self.equations < self.variables
            or self.inequalities < 1
            or self.instances < 24
        ):
            raise ValueError(
                f"{self}: give 0 < equations < variables, 1 inequality, 24 instances."
            )


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
    H: Tensor | None = None  # (K, V, V), of quadratic constraints


@lru_cache
def _numbers_of(path: str) -> dict[str, Tensor]:
    """The arrays of a file, float64, with sizes that agree."""
    if not Path(path).is_file():
        raise DataError(f"{path}: no such file of matrices.")
    try:
        with np.load(path, allow_pickle=False) as file:
            numbers = {
                name: torch.from_numpy(file[name].astype(np.float64)) for name in file
            }
    except (ValueError, OSError, AttributeError) as error:
        raise DataError(f"{path} is no .npz file of numbers: {error}") from error
    lacking = [name for name in ("Q", "p", "A", "G", "h", "X") if name not in numbers]
    if lacking:
        raise DataError(
            f"{path} lacks {', '.join(lacking)}: give Q, p, A, G, h and X, of minimise "
            "½yᵀQy + pᵀy subject to Ay = x, Gy ≤ h."
        )
    variables = numbers["p"].numel()
    count = numbers["h"].numel()
    shapes: dict[str, list[tuple[int, ...]]] = {
        "Q": [(variables,), (variables, variables)],
        "p": [(variables,)],
        "A": [(len(numbers["A"]), variables)],
        "G": [(count, variables)],
        "h": [(count,)],
        "X": [(len(numbers["X"]), len(numbers["A"]))],
        "H": [(count, variables), (count, variables, variables)],
        "optimum": [(len(numbers["X"]),)],
    }
    for name, value in numbers.items():
        allowed = shapes.get(name, [tuple(value.shape)])
        if tuple(value.shape) not in allowed:
            wanted = " or ".join(map(str, allowed))
            raise DataError(
                f"{path}: {name} is {tuple(value.shape)}, and should be {wanted}."
            )
        if name != "optimum" and not value.isfinite().all():
            raise DataError(f"{path}: {name} has numbers that are not finite.")
    if int(torch.linalg.matrix_rank(numbers["A"])) < len(numbers["A"]):
        raise DataError(
            f"{path}: the rows of A depend on each other; leave out those that do."
        )
    return numbers


def _of_file(path: str) -> Problems:
    numbers = _numbers_of(path)
    equal = numbers["A"]
    quadratic = numbers.get("H")
    null = torch.linalg.svd(equal)[2][len(equal) :].T.contiguous()
    if quadratic is not None and quadratic.dim() == 2:
        quadratic = torch.diag_embed(quadratic)
    return Problems(
        Q=numbers["Q"],
        p=numbers["p"],
        A=equal,
        G=numbers["G"],
        h=numbers["h"],
        x=numbers["X"],
        plus=torch.linalg.pinv(equal),
        null=null,
        H=quadratic,
    )


@lru_cache
def problems(family: Family) -> Problems:
    """The family's numbers. With DC3's h every x has a feasible y: that without z."""
    if family.file:
        return _of_file(family.file)
    variables = family.variables
    draw = np.random.RandomState(SEED)
    square = draw.random_sample(variables)
    linear = draw.random_sample(variables)
    equal = draw.normal(0, 1, (family.equations, variables))
    x = draw.uniform(-1, 1, (family.instances, family.equations))
    below = draw.normal(0, 1, (family.inequalities, variables))
    plus = np.linalg.pinv(equal)
    null = np.linalg.svd(equal)[2][family.equations :].T.copy()
    return Problems(
        Q=torch.from_numpy(square),
        p=torch.from_numpy(linear),
        A=torch.from_numpy(equal),
        G=torch.from_numpy(below),
        h=torch.from_numpy(np.abs(below @ plus).sum(1)),
        x=torch.from_numpy(x),
        plus=torch.from_numpy(plus),
        null=torch.from_numpy(null),
    )


def cost(y: Tensor, Q: Tensor, p: Tensor, nonconvex: bool) -> Tensor:  # noqa: N803
    """½ yᵀQy + pᵀy, or pᵀ sin y: (B, V) ↦ (B,); Q (V,), a diagonal, or (V, V)."""
    squares = y.square() @ Q if Q.dim() == 1 else ((y @ Q) * y).sum(1)
    return squares / 2 + (y.sin() if nonconvex else y) @ p


def program_of(family: Family) -> QuadraticProgram:
    """The family's problems, with bounds; refuses those that are not convex."""
    of = problems(family)
    return QuadraticProgram(of.Q, of.p, of.A, of.G, of.h, of.H)


def _optimum_of_file(family: Family) -> Tensor:
    """Those that the file gives, else by Newton steps on the bound; NaN where they do not close.

    With a sine by ADMM, as of DC3's problems, where Q is a diagonal and constraints are linear.
    """
    of = problems(family)
    trained = split_of(family)["train"].stop
    unknown = torch.full((family.instances,), torch.nan, dtype=torch.float64)
    of_file = _numbers_of(family.file).get("optimum")
    if of_file is not None:
        return of_file
    if family.nonconvex:
        if of.Q.dim() > 1 or of.H is not None:
            return unknown
        y = stationary_points(family, of.x[trained:])
        unknown[trained:] = cost(y, of.Q, of.p, nonconvex=True)
        return unknown
    program = program_of(family)
    x = of.x[trained:]
    multipliers = program.ascend(x, x.new_zeros(len(x), len(of.h)), 50)
    bound = program.dual(x, multipliers)
    y = program.minimiser(x, multipliers)
    y = newton_corrected(y, program.inequalities, program.slopes, within=program.null)
    value = program.objective(y)
    closed = (value - bound <= 1e-5 * value.abs()) & (program.violation(y, x) <= 1e-6)
    unknown[trained:] = torch.where(closed, value, torch.nan)
    return unknown


@lru_cache
def optimum(family: Family, tolerance: float = 1e-6, steps: int = 20_000) -> Tensor:
    """(N,) least objective; NaN of the instances that train: see ``stationary_points``."""
    if family.file:
        return _optimum_of_file(family)
    of = problems(family)
    trained = split_of(family)["train"].stop
    y = stationary_points(family, of.x[trained:], tolerance, steps)
    least = cost(y, of.Q, of.p, family.nonconvex)
    return torch.cat([torch.full((trained,), torch.nan), least])


def stationary_points(
    family: Family, x: Tensor, tolerance: float = 1e-6, steps: int = 20_000
) -> Tensor:
    """The best answers to x (B, E), (B, V), by ADMM in z: y = A⁺x + Nz; with linear constraints.

    Until no primal or dual residual is above the tolerance. With the sine, which is replaced by its
    tangent and a parabola above it in each step, a stationary point and not the least for sure.
    """
    of = problems(family)
    start = x @ of.plus.T
    curved = of.Q + of.p if family.nonconvex else of.Q
    hessian = of.null.T * curved @ of.null
    under = of.G @ of.null
    bound = of.h - start @ of.G.T
    rho = 1 / family.variables  # As long as the rows of GN are, it weighs like Q.
    inverse = torch.linalg.inv(hessian + rho * under.T @ under)
    y = start
    s = bound.clamp(max=0)  # Of values Gy − Gstart, within the bound.
    u = torch.zeros_like(bound)
    for _ in range(steps):
        slope = y * of.Q + of.p * (y.cos() if family.nonconvex else 1)
        z = (((y - start) * curved - slope) @ of.null + rho * (s - u) @ under) @ inverse
        values = z @ under.T
        earlier_s = s
        earlier_y = y
        y = start + z @ of.null.T
        s = torch.minimum(values + u, bound)
        u = u + values - s
        primal = (values - s).abs().max()
        dual = ((s - earlier_s) @ under).abs().max()
        moved = (y - earlier_y).abs().max()
        if max(primal, dual, moved) < tolerance:
            return y
    raise DataError(
        f"The optimum of {family} was not found in {steps} steps: take another size."
    )


def split_of(family: Family) -> dict[str, slice]:
    """The instances of each part: the last two twelfths are held out."""
    held, count = family.instances // 12, family.instances
    cuts = (0, count - 2 * held, count - held, count)
    return {name: slice(*cuts[i : i + 2]) for i, name in enumerate(SPLITS)}


class Proxy(nn.Module):
    """The network: x (B, E) ↦ y (B, V); by completion y = A⁺x + N·z(x), which holds Ay = x."""

    Q: Tensor
    p: Tensor
    A: Tensor
    G: Tensor
    h: Tensor
    plus: Tensor
    null: Tensor

    def __init__(
        self, family: Family, equalities: Equalities, width: int = 200
    ) -> None:
        super().__init__()
        self.nonconvex = family.nonconvex
        self.completes = equalities == "completion"
        numbers = problems(family)
        for name in ("Q", "p", "A", "G", "h", "plus", "null"):
            self.register_buffer(name, getattr(numbers, name).float())
        self.H = None if numbers.H is None else nn.Buffer(numbers.H.float())
        self.diagonals: Tensor | None
        self.register_buffer("diagonals", diagonals_of(self.H), persistent=False)
        outputs = family.variables - (family.equations if self.completes else 0)
        sizes = (family.equations, width, width, outputs)
        layers: list[nn.Module] = []
        for inputs, width_after in pairwise(sizes):
            layers += [nn.Linear(inputs, width_after), nn.ReLU()]
        self.network = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.network(x)
        return x @ self.plus.T + z @ self.null.T if self.completes else z

    def objective(self, y: Tensor) -> Tensor:  # (B,)
        return cost(y, self.Q, self.p, self.nonconvex)

    def inequalities(self, y: Tensor, x: Tensor) -> Tensor:  # (B, K)
        linear: Tensor = y @ self.G.T - self.h
        if self.H is None:
            return linear
        return linear + quadratic_terms(y, self.H, self.diagonals) / 2

    def equalities(self, y: Tensor, x: Tensor) -> Tensor:  # (B, E)
        return y @ self.A.T - x


class FamilyModule(PointwiseModule):
    """A network that answers the problems of a family.

    Args:
        formulation: how the constraints are enforced.
        family: which problems; the data's too.
        equalities: "completion": held by the network's last layer; "loss": a second constraint.
        margin: by how much more than needed an inequality is to hold in training.
        correction: steps of :class:`~pl_pointwise.correction.Corrected` in evaluation.
        training: optimizer and schedule.
        bound: whether answers are evaluated, and exported, with a proof: ``solver`` is
            :class:`~pl_pointwise.bounds.Certified`, and `gap` what it proves. Where the problems
            are not convex, :class:`~pl_pointwise.bounds.Stationary`.
        proof: an answer whose gap is above it counts as `unproved`.
        problem: an ``.npz`` file of one's own problems in place of ``family``, and of the data's:
            ``Family.of_file``.

    .. versionadded:: 0.3.0

    >>> from pl_pointwise import Pointwise
    >>> from pl_pointwise.tasks.family import Family, FamilyModule
    >>> family = Family(variables=6, equations=3, inequalities=3, instances=24)
    >>> module = FamilyModule(Pointwise(), family, bound=True)
    >>> list(module.constraints)
    ['inequalities']
    """

    shared_objective = "gap"
    shared_violation = "worst"

    def __init__(
        self,
        formulation: Formulation | None,
        family: Family = Family(),
        equalities: Equalities = "completion",
        margin: float = 0.0,
        correction: int = 0,
        training: Training | None = None,
        bound: bool = False,
        proof: float = 0.005,
        problem: str | None = None,
    ) -> None:
        one_of("equalities", equalities, ("completion", "loss"))
        family = from_plain(Family, family)
        if problem is not None:
            family = Family.of_file(problem, family.nonconvex)
        exact = {"equalities": Constraint(equals=0.0)} if equalities == "loss" else {}
        super().__init__(
            formulation=formulation,
            constraints={"inequalities": Constraint(at_most=0.0 - margin), **exact},
            evaluation_constraints={"inequalities": Constraint(at_most=0.0)},
            training=training or Training(),
        )
        self.family = family
        self.equalities = equalities
        self.problem = problem
        self.proof = proof
        proxy = Proxy(self.family, equalities)
        self.solver: nn.Module = Corrected(
            proxy, proxy.inequalities, correction, within=proxy.null
        )
        self.correction = correction
        self.bound_trained = False
        if bound and not family.nonconvex:
            dual = DualNetwork(family.equations, torch.zeros(family.inequalities))
            self.solver = Certified(
                proxy, program_of(family), dual.requires_grad_(False)
            )
        elif bound:
            of = problems(family)
            convex = QuadraticProgram(of.Q, of.p, of.A, of.G, of.h, of.H)
            self.solver = Stationary(
                proxy, convex, lambda y: cost(y, of.Q.to(y), of.p.to(y), nonconvex=True)
            )

    @property
    def proxy(self) -> Proxy:
        """The network without the correction."""
        return self.solver.model  # type: ignore[return-value]

    def setup(self, stage: str) -> None:
        if isinstance(self.solver, Stationary) and stage == "fit":
            log.warning(
                "Problems with a sine are not convex, and have no bound: instead of a gap the "
                "answers have their stationarity, which says nothing of better ones elsewhere."
            )
        of_data = getattr(self.trainer.datamodule, "family", self.family)
        if of_data != self.family:
            raise DataError(
                f"model.family is {self.family}, data.family {of_data}: set both alike."
            )

    def forward(self, batch: Any) -> Tensor:
        if self.training:
            return self.proxy(batch["x"])
        answer = self.solver(batch["x"])
        y: Tensor = answer if isinstance(answer, Tensor) else answer.y
        return y

    def on_train_epoch_end(self) -> None:
        """λ(x) is trained once prices are known: every checkpoint after that has it."""
        epochs = self.trainer.max_epochs or 0
        if self.trainer.current_epoch + 1 >= max(1, epochs // 3):
            self.train_bound()

    def on_train_end(self) -> None:
        self.train_bound()

    def train_bound(self, epochs: int = 20) -> None:
        """Trains λ(x) by the bound of the training instances, once, from the run's mean price."""
        if self.bound_trained or not isinstance(self.solver, Certified):
            return
        self.bound_trained = True
        program = self.solver.program
        dual = self.solver.network
        count = self.family.inequalities
        price = (
            self.prices.mean("inequalities") if "inequalities" in self.prices else None
        )
        # A mean over a sample's values, so that λ of the mean objective is a K-th of the price.
        start = (
            torch.zeros(count) if price is None else price[:count].nan_to_num() / count
        )
        dual.start_at(start)
        x = (
            problems(self.family)
            .x[split_of(self.family)["train"]]
            .to(program.null.device)
        )
        batch = min(200, -(-len(x) // 10))
        train_bound(dual, program, x, epochs=epochs, batch=batch)

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:  # (B,)
        return self.proxy.objective(outputs)

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        # (B, K)
        values = {"inequalities": self.proxy.inequalities(outputs, batch["x"])}
        if self.equalities == "loss":
            values["equalities"] = self.proxy.equalities(outputs, batch["x"])  # (B, E)
        return values

    def evaluation_metrics(self) -> dict[str, Metric]:
        names = ["gap", "worst", "beyond", "equality"]
        if isinstance(self.solver, Certified):
            names += ["unproved"]
        elif isinstance(self.solver, Stationary):
            names += ["stationarity"]
        return {name: MeanBySample() for name in names}

    def update_evaluation_metrics(
        self,
        metrics: dict[str, Metric],
        outputs: Tensor,
        batch: Any,
        real: Tensor,
        stage: str,
    ) -> None:
        index = batch["index"]
        proxy = self.proxy
        worst = proxy.inequalities(outputs, batch["x"]).amax(1).clamp(min=0)
        metrics["worst"].update(index, worst)
        metrics["beyond"].update(index, (worst > BEYOND).float())
        metrics["equality"].update(
            index, proxy.equalities(outputs, batch["x"]).abs().mean(1)
        )
        if isinstance(self.solver, Certified):
            proved = self.solver.proved(batch["x"], outputs)
            beyond = (proved.gap > self.proof) | (proved.violation > ALLOWED)
            metrics["unproved"].update(index, beyond.float())
            metrics["gap"].update(index, proved.gap.clamp(0, 1).float())
            return
        if isinstance(self.solver, Stationary):
            residual = self.solver.described(batch["x"], outputs).stationarity
            metrics["stationarity"].update(index, residual.float())
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
        options = {"equalities": self.equalities, "correction": self.correction}
        usage = USAGE.format(family=asdict(self.family), **options)
        if isinstance(self.solver, (Certified, Stationary)):
            fields = ", ".join(self.solver.returns._fields)
            usage = usage.replace(f"correction={self.correction})", "bound=True)")
            usage = usage.replace(
                "y = module.solver(x)", f"{fields} = module.solver(x)"
            )
        write_card(self, folder, **kinds, base_model=None, usage=usage)
        return folder


class FamilyDataModule(PointwiseDataModule):
    """The instances x of ``family``, uniform in [−1, 1]; those held out with their optimum.

    .. versionadded:: 0.3.0

    >>> from pl_pointwise.tasks.family import Family, FamilyDataModule
    >>> family = Family(variables=6, equations=3, inequalities=3, instances=24)
    >>> data = FamilyDataModule(family, batch_size=8)
    >>> data.setup("fit")
    >>> len(data.datasets["train"])
    20
    """

    def __init__(self, family: Family = Family(), **options: Any) -> None:
        super().__init__(**options)
        self.family = from_plain(Family, family)

    def setup(self, stage: str) -> None:
        module = getattr(self.trainer, "lightning_module", None)
        if getattr(module, "problem", None) is not None:
            self.family = module.family  # type: ignore[union-attr]
        x = problems(self.family).x.float()
        best = optimum(self.family).float()
        for split, part in split_of(self.family).items():
            rows = []
            for instance, least in zip(x[part], best[part], strict=True):
                rows.append({"x": instance, "optimum": least})
            self.datasets[split] = rows
