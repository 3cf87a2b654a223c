"""α found and grown by a fit itself, so that a user states ε and no step sizes.

First value (``alpha="auto"``), from the first batch that carries the constraint, before its step:

    α = s₀ / mean (v)₊²,    s₀ = mean |ℓ₀|

so that the quadratic term weighs as much as the objective, whatever the units of either. Where
hardly a value is violated v tells no scale: α = s₀. An objective that starts at 0, such as a KL to
the model itself, tells none: α is then 1, whatever v is, which suits constraints in the objective's
unit. That is asked without dropout, which alone makes a small KL. (Dividing a stated s₀ by
mean (v)₊² made the constraint that was nearly met the strongest.)
The growth below corrects a first value that is too small; one that is too large costs objective.

Growth (``alpha_growth="auto"``): after an epoch whose violations are, in their root mean square,
more than half of those of the epoch before, α doubles, a rule of the method of multipliers
(Bertsekas 1982, chapter 2). Not where at most one value in twenty was violated: then the
requirement is met. Of ``Relaxed`` what counts is v − u*, what it does not relax.

With η = 2α (``dual_lr="auto"``) this is what won among the dual steps that were tried:
docs/evidence.md.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .formulation import Ascending, Formulation
from .step import OBJECTIVE, Measured, Terms, widest

if TYPE_CHECKING:
    from .module import PointwiseModule

log = logging.getLogger(__name__)

NOTHING = 1e-3  # An objective up to this without dropout is 0 but for rounding,
PLAIN = 1.0  # and this is α.
FACTOR = 2.0
STALLED = 0.5  # Of the epoch before's violations.
MET = 0.05  # Share of violated values; of |ℓ − c| and v − u*, their size against the first epoch's.


@dataclass
class _State:
    """Of one constraint."""

    alpha: float
    first: float
    epoch: int = 0  # That the sums are of.
    squares: float = 0.0  # Σ r₊², or r² of an equality, over the visits of the epoch.
    violated: int = 0
    visits: int = 0
    before: float | None = None  # Root mean square of the epoch before.
    start: float | None = None  # And of the first.


class AdaptiveAlpha:
    """The α in force of every constraint whose formulation ``adapts``."""

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}

    def in_force(self, name: str, declared: Formulation, epoch: int) -> Formulation:
        """A constraint's formulation with α of the epoch."""
        if isinstance(declared, Ascending) and declared.adapts:
            state = self._known(name, declared)
            declared = declared if state is None else declared.with_alpha(state.alpha)
        return declared.at_epoch(epoch)

    def without_start(self, formulations: Mapping[str, Formulation]) -> list[str]:
        """The constraints whose α the first batch has still to tell."""
        return [
            name
            for name, f in formulations.items()
            if isinstance(f, Ascending) and f.alpha == "auto" and self._known(name, f) is None
        ]

    def start(
        self,
        module: PointwiseModule,
        terms: Iterable[Terms],
        at_rest: Iterable[Terms],
        names: Iterable[str],
    ) -> None:
        """Sets the first α of the constraints ``names`` that the batch carries, on every rank.

        at_rest: the terms of the same batch in evaluation mode.
        """
        parts = list(zip(terms, at_rest, strict=True))
        for name in names:
            sums = torch.zeros(6, dtype=torch.float64)
            for part, resting in parts:
                sums += _first_sums(part, resting, name, module.formulations[name].signed)
            sums = module._over_ranks(sums.to(module.device, widest(module.device)), "sum").cpu()
            objective, resting_objective, carrying, squares, violated, values = sums.tolist()
            if not values:
                continue
            square = squares / values if violated / values > MET else 1.0
            starts_at_zero = not carrying or resting_objective <= NOTHING * carrying
            alpha = PLAIN if starts_at_zero else objective / carrying / square
            declared = module.formulations[name]
            assert isinstance(declared, Ascending)
            alpha = min(alpha, declared.largest_alpha(alpha))
            self._states[name] = _State(alpha, alpha, module.current_epoch)
            if module.trainer.is_global_zero:
                log.info('alpha of "%s" starts at %.3g.', name, alpha)

    def add(self, measured: Measured, formulations: Mapping[str, Formulation], epoch: int) -> None:
        """Adds a step's violations."""
        for name, formulation in formulations.items():
            if not isinstance(formulation, Ascending) or formulation.alpha_growth != "auto":
                continue
            state = self._state_of(name, formulation, epoch)
            if state is None:
                continue
            mask = measured.masks[name]
            violation, multiplier = measured.violations[name], measured.multipliers[name]
            now: Any = formulation.with_alpha(state.alpha)
            if hasattr(now, "relaxation"):
                violation = violation - now.relaxation(violation, multiplier)
            residual = violation[mask]
            residual = residual.abs() if formulation.signed else residual.clamp(min=0)
            state.squares += float(residual.double().square().sum())
            state.violated += int((residual > 0).sum())
            state.visits += len(residual)

    def start_epoch(self, formulations: Mapping[str, Formulation], epoch: int) -> None:
        """Lets α grow by what the epoch before has measured."""
        for name, state in self._states.items():
            formulation = formulations.get(name)
            if state.epoch == epoch or not isinstance(formulation, Ascending):
                continue
            if state.visits:
                size = (state.squares / state.visits) ** 0.5
                state.start = size if state.start is None else state.start
                met = state.violated <= MET * state.visits
                if formulation.signed or hasattr(formulation, "relaxation"):
                    met = size <= MET * state.start  # Never quite 0.
                if state.before is not None and size > STALLED * state.before and not met:
                    largest = formulation.largest_alpha(state.first)
                    state.alpha = min(FACTOR * state.alpha, largest)
                state.before = size
            state.epoch, state.squares, state.violated, state.visits = epoch, 0.0, 0, 0

    def state_dict(self) -> dict[str, dict[str, float | int | None]]:
        return {name: asdict(state) for name, state in self._states.items()}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """
        Raises:
            TypeError: no state of this class's.
        """
        self._states = {name: _State(**state) for name, state in states.items()}
        numbers = [value for state in self._states.values() for value in vars(state).values()]
        if not all(n is None or (type(n) in (int, float) and math.isfinite(n)) for n in numbers):
            raise TypeError("a state that is no number")

    def _state_of(self, name: str, formulation: Ascending, epoch: int) -> _State | None:
        if self._known(name, formulation) is None and isinstance(formulation.alpha, float):
            self._states[name] = _State(formulation.alpha, formulation.alpha, epoch)
        return self._known(name, formulation)

    def _known(self, name: str, declared: Ascending) -> _State | None:
        """None also where the state is of another α that was stated, as before a change of it."""
        state = self._states.get(name)
        return state if state and declared.alpha in ("auto", state.first) else None


def _first_sums(terms: Terms, at_rest: Terms, name: str, signed: bool) -> Tensor:
    """Σ|ℓ₀|, the same at rest, samples, Σ(v)₊², violated values, values; of an equality v²."""
    values = _finite(terms.violations[name], terms.masks[name])
    objective = _finite(terms.objective, terms.masks[OBJECTIVE]).abs()
    resting = _finite(at_rest.objective, at_rest.masks[OBJECTIVE]).abs()
    excess = values.abs() if signed else values.clamp(min=0)
    counts = [len(objective), excess.square().sum(), (excess > 0).sum(), len(values)]
    return torch.tensor([objective.sum(), resting.sum(), *counts], dtype=torch.float64)


def _finite(values: Tensor, mask: Tensor) -> Tensor:
    values = values.detach().cpu()[mask.cpu()].double()
    return values[values.isfinite()]
