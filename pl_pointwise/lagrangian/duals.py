"""The multipliers and the rule that moves them: in a step, at a run's start, in a checkpoint."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ..constraint import Constraint
from ..errors import DataError, TrainingError
from ..formulations import Formulation
from ..multipliers import Multipliers
from .gradient_units import GradientUnits
from .scopes import PerBatch, Slope, State, scope_of
from .terms import DualStep, Measured, Terms, is_index, shape_of

log = logging.getLogger(__name__)


class Duals(State):
    """λ of every constraint, of ``samples`` samples (0: a stream), and when and how it moves.

    Attributes:
        units: Λ and r of the formulations that find their own α.
        in_force: the formulations with α a number, of the last step.
        scopes: by constraint what ψ acts on; on_batch: those of a batch's statistic.
    """

    warn: Callable[[str], None] = staticmethod(log.warning)

    def __init__(
        self,
        constraints: Mapping[str, Constraint],
        formulations: Mapping[str, Formulation],
        samples: int = 0,
        primal_steps: int = 1,
        order: str = "simultaneous",
        groups: Tensor | None = None,
    ) -> None:
        self.constraints = constraints
        self.configure(formulations, primal_steps, order, groups)
        self.multipliers = Multipliers(self.owners_of(samples))
        self.thresholds: dict[str, Tensor] = {}
        self.units = GradientUnits()
        self.in_force: dict[str, Formulation] = {}
        self.fingerprint: str | None = None
        self._window: list[dict[str, list[Tensor]]] = []
        """The updated samples of the steps since the last dual step."""

    def configure(
        self,
        formulations: Mapping[str, Formulation],
        primal_steps: int,
        order: str,
        groups: Tensor | None,
    ) -> None:
        """How λ moves from now on, and whose it is."""
        self.formulations, self.groups = formulations, groups
        self.primal_steps, self.dual_first = primal_steps, order == "dual_first"
        self.scopes = {name: scope_of(name, self) for name in formulations}
        self.on_batch = {n: s for n, s in self.scopes.items() if isinstance(s, PerBatch)}

    def owners_of(self, samples: int) -> int:
        """How many rows λ has: one a sample, or one a group."""
        return samples if self.groups is None else int(self.groups.max()) + 1

    # In a step ----------------------------------------------------------------------------------

    def put_in_force(self, steps_an_epoch: float = math.inf) -> None:
        """The formulations of this step; steps from one visit of a sample to the next."""
        between = max(steps_an_epoch, self.primal_steps)
        self.in_force = self.units.in_force(self.formulations, self.constraints, between)
        for name, scope in self.scopes.items():
            scope.formulation = self.in_force[name]

    def step(self, measured: Measured, steps_an_epoch: float) -> dict[str, DualStep]:
        """λ ← (λ + η ∂ψ/∂λ)₊ for the samples seen since the last dual step, and no others.

        Each with its last violation; a statistic with its mean. Nothing while a window is open:
        what it needs of the step of the weights, which ``measured`` tells, is kept by constraint.
        """
        visits = {
            name: visit
            for name, scope in self.scopes.items()
            if (visit := scope.visit(measured)) is not None
        }
        self._window.append(visits)
        self.units.add(measured, self.formulations, self.in_force, steps_an_epoch)
        if len(self._window) < self.primal_steps:
            return {}
        window, self._window = self._window, []
        by_name = {n: [visits[n] for visits in window if n in visits] for n in self.scopes}
        steps = {name: self.scopes[name].step(visits) for name, visits in by_name.items() if visits}
        return {name: step for name, step in steps.items() if step is not None}

    @property
    def knows_slopes(self) -> bool:
        """Whether every ∂ψ/∂mean is λ, whatever the batch: those of PointwiseLoss.share."""
        return all(scope.knows_slope for scope in self.on_batch.values())

    def slopes(self, terms: Sequence[Terms], counts: Mapping[str, Tensor]) -> dict[str, Slope]:
        """∂ψ/∂mean by constraint, of all micro-batches of all ranks."""
        return {name: scope.slope(terms, counts[name]) for name, scope in self.on_batch.items()}

    # At the start of a fit ----------------------------------------------------------------------

    def start(self, samples: int, fingerprint: str | None, resumed: bool, first: bool) -> None:
        """Keeps the multipliers if they belong to this training set, or starts them again.

        samples, fingerprint: of the training set; 0 and None of a stream. resumed: whether they are
        a checkpoint's. first: whether steps are counted from 0 by a fit that is not resumed.
        """
        if not resumed and fingerprint != self.fingerprint:
            if self.fingerprint is not None and samples:
                self.warn("Another training set than before: the multipliers start at 0 again.")
            self.multipliers = self.multipliers.for_samples(self.owners_of(samples))
            self.thresholds, self.units, self._window = {}, GradientUnits(), []
        self.fingerprint = fingerprint
        self.fit_tables()
        if first:  # What was measured stays until it is measured again.
            self.units.load_state_dict({**self.units.state_dict(), "next": 0})

    def fit_tables(self) -> None:
        """Fits multipliers and thresholds to the formulations of now, or refuses them.

        Kept under another formulation of the same scope; dropped, with a warning, without one.
        """
        multipliers = self.multipliers
        for name in set(multipliers).intersection(multipliers.pending()):
            self.warn(f'Multipliers of "{name}" are the checkpoint\'s, not those that were set.')
            del multipliers.pending()[name]
        for name in [*multipliers, *multipliers.pending()]:
            formulation = self.formulations.get(name)
            dimensions = None if formulation is None else self.scopes[name].dimensions
            if formulation is None or dimensions is None:
                what = "no such constraint" if formulation is None else repr(formulation)
                self.warn(f'Multipliers of "{name}" are dropped: this module has {what}.')
                multipliers.reset(name)
                continue
            table = multipliers.get(name)
            if table is None:
                table = multipliers.pending()[name]
            elif (table.dim() == 2) != (dimensions == 2):
                scope = "sample" if table.dim() == 2 else "constraint"
                raise TrainingError(
                    f'Constraint "{name}": its multipliers are one per {scope}, and those of '
                    f"{formulation} are not. Start them again from 0: {_remedy(name)}."
                )
            if not formulation.signed and (table < 0).any():
                raise TrainingError(
                    f'Constraint "{name}" has multipliers below 0, which only an equality has. '
                    f"Set others, or start them from 0: {_remedy(name)}."
                )
        # What was reset takes no step from values of before, nor from a threshold of before.
        self._window = [
            {name: visit for name, visit in visits.items() if name in multipliers}
            for visits in self._window
        ]
        self.thresholds = {
            name: threshold
            for name, threshold in self.thresholds.items()
            if name in multipliers and self.formulations[name].learns_threshold
        }

    # In a checkpoint ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "samples": self.multipliers.samples,
            "multipliers": self.multipliers.state_dict(),
            "thresholds": dict(self.thresholds),
            "gradient_units": self.units.state_dict(),
            "fingerprint": self.fingerprint,
            "window": self._window,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.multipliers = self.multipliers.for_samples(int(state["samples"]))
        self.multipliers.load_state_dict(state["multipliers"])
        self.thresholds = {
            name: value.to("cpu", torch.float32, copy=True)
            for name, value in state["thresholds"].items()
        }
        self.units.load_state_dict(state["gradient_units"])
        self._window = [dict(visits) for visits in state["window"]]
        self.fingerprint = state["fingerprint"]


def _remedy(name: str) -> str:
    return (
        f"call module.multipliers.reset({name!r}) before fit; of a checkpoint, after "
        "load_from_checkpoint, and fit without ckpt_path"
    )


def group_numbers(groups: Any, samples: int, whose: str = "groups") -> Tensor:
    """The group of each of N samples, (N,) int64; refuses what is no number from 0 for each."""
    found = None
    with suppress(ValueError, TypeError):  # Of texts.
        found = torch.as_tensor(groups).cpu()
    if found is None or not is_index(found) or len(found) != samples or (found < 0).any():
        raise DataError(
            f"{whose}: a whole number from 0 for each of the {samples:,} samples, got "
            f"{shape_of(groups)}; np.unique(groups, return_inverse=True)[1] numbers them."
        )
    return found.long()
