"""The dual rule that needs ε alone: an augmented Lagrangian in the unit of the gradients.

At a constrained optimum ∇ℓ₀ = −Σ λ∇v. So the multipliers of a constraint are measured in

    Λ = ‖∇ mean ℓ₀‖ / ‖∇ mean v‖,  the second mean over the violated values,

whatever ℓ₀ and v are measured in, and whatever constant ℓ₀ has. With r the mean of the violated
values, m that of (v)₊ over all values, M the largest that m was (forgotten within
an epoch and a half; never where samples have no λ), λ̄ the mean multiplier of the values that have a
force or a multiplier, s the share of the values that violate or have a multiplier, Λ₀ the first Λ
or the present one, whichever is less, L ten in a run of at most ten epochs, else 1, and
v⁺ = v + r/4 (v for an equality),

    P = min(max(2Λ·M/m + λ̄, 2Λ₀·min(1/s, L)), 100Λ),
    force on a sample: (λ + P·min(v⁺/r, 1))₊,    update: λ ← (λ + min(0.6P, 10Λ)·clip(v⁺/r, ±1))₊.

The force is that of an augmented Lagrangian with α = P/2r, linear beyond r.

- A requirement first pushes twice as hard as the objective, however few samples violate it: ψ is
  averaged over all of them, hence 1/s. With multipliers on more of them that part is less. In more
  than ten epochs λ has the time to grow to what few samples need, and a hard push at the start
  costs objective that is not made up for: hence L.
- An objective that starts at its minimum, as the distance to the model before training does, has
  no gradient there: Λ₀ is 0. Λ grows with the distance that the push makes, and a push that grew
  with it would be its own reason.
- P grows as m falls: fewer samples are left to push. Where pushing does not lower m, it does not.
- From the second epoch on λ grows by a factor while a violation stays, and falls where there is
  slack; for an interval by half of that, as each side has a multiplier; for an equality by a
  quarter, as λ never has slack and follows noise. Where an epoch is fewer than W steps, the weights
  could not follow λ: an update is that part.
- W is ten, in a run of T steps s²·T/25 where that is more: on the way to the bound, while all
  samples violate, updates come to 25 whole ones at most. A λ that grows in every epoch until the
  weights arrive is far too large when they do, which an objective that is slow itself never makes
  up for (a residual of a differential equation). The 2Λ are then 2Λ·20/W, where that is less. Once
  few violate, λ decides which, and waits no more. Not for an equality: all its samples violate it
  at all times.
- v⁺ aims inside the bound, and r shrinks with the violations. Beyond r nothing pushes harder.
- 100Λ bounds the first violation after a long time, 10Λ samples that cannot be satisfied.

A price of :class:`Relaxed` is in Λ·min(1/s, 10): a share s of the samples balances the objective.

Λ is measured in the steps 0, 1, 2, 4, 8, …, later as often as costs 3 % of the time; one step that
a constraint is violated in is enough to start. m follows the last ten steps, r and λ̄ an epoch, or
twenty steps where that is more.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..constraint import Constraint
from ..formulations import STANDARD_STEP, Ascending, Formulation, Scale
from .terms import Measured

log = logging.getLogger(__name__)

MARGIN = 0.25
"""How far inside the bound a multiplier of a sample aims, in r."""
LEAD = 2.0
"""The force of a requirement at the start, in Λ."""
PATIENCE = 0.6
"""How far an update moves λ, in P."""
MEMORY = 1.5
"""Epochs within which M is forgotten."""
TEN = 10
"""What counts as many. In so many steps the weights follow a λ: m and s cover so many, M at least,
r and λ̄ twice that at least, else an epoch. A run of more epochs gives λ the time to grow to what
few samples need; in a shorter one they push so much harder at most. An update moves λ by so many Λ
at most, and P is so many times that at most."""
UPDATES = 25.0
"""Whole updates of a sample's λ in a run at most, while all samples violate."""

COST = 0.03
"""Of a fit's time: what later measurements of Λ may take, each at most a pass a term more."""


@dataclass
class _State:
    """What is known of one constraint."""

    unit: float | None = None  # Λ.
    # The first Λ that was measured; 0 where the objective was at its minimum then.
    first_unit: float = 0.0
    tried: bool = False  # Whether Λ was to be measured, however it came out.
    measurements: int = 0  # Of Λ; 0 where the objective has had no gradient yet.
    size: float | None = None  # r.
    steps: int = 0  # With a violated value, which r is the mean of.
    mean: float = 0.0  # m.
    largest: float = 0.0  # M.
    share: float = 1.0  # s, of the values.
    visits: int = 0  # Steps with a value, which m is the mean of.
    multiplier: float = 0.0  # λ̄.
    # Steps with a value that pulls or has a multiplier, which λ̄ is the mean of.
    pulls: int = 0


@dataclass(frozen=True)
class _Values:
    """What a step measured of the values that a constraint applies to, (n,) each."""

    violated: Tensor  # bool
    residual: Tensor  # (v)₊, of an equality |v|; 0 where a linear cost relaxes.
    multiplier: Tensor


def _add(state: _State, values: _Values, steps_an_epoch: float) -> None:
    """Adds a step's values of one constraint to its running means."""
    window = max(2 * TEN, min(steps_an_epoch, 1000))
    residual, multiplier = values.residual, values.multiplier
    pulling, pushed = (
        multiplier[(residual > 0) | (multiplier != 0)],
        residual[residual > 0],
    )
    state.visits += 1
    steps = min(state.visits, TEN)
    state.mean += (float(residual.mean()) - state.mean) / steps
    share = float((values.violated | (multiplier != 0)).double().mean())
    state.share += (share - state.share) / steps
    kept = 1 - 1 / max(TEN, MEMORY * steps_an_epoch)
    state.largest = max(kept * state.largest, state.mean)
    if len(pulling):
        state.pulls += 1
        mean = float(pulling.abs().double().mean())
        state.multiplier += (mean - state.multiplier) / min(state.pulls, window)
    if len(pushed):
        state.steps += 1
        before = state.size or 0.0
        mean = float(pushed.mean())
        state.size = before + (mean - before) / min(state.steps, window)


def _of_few(share: float, sides: int, most: float) -> float:
    """How much harder each of few samples pushes: one over their share, within 1 and ``most``.

    share: s of the values, of which an interval's samples have two and violate one at most.
    """
    return min(1 / min(max(sides * share, 1e-9), 1.0), most)


def _most_of_few(steps_between: float, total_steps: int | None) -> float:
    """L: the most that the above comes to. Arguments as of :meth:`GradientUnits.in_force`."""
    short = total_steps is None or total_steps <= TEN * steps_between
    return TEN if short else 1.0


def _waiting(share: float, sides: int, total_steps: int | None) -> float:
    """W: the steps that λ waits for. Arguments as above; None where the run's end is not known."""
    way = min(sides * share, 1.0) ** 2 * (total_steps or 0)
    return max(TEN, way / UPDATES)


def _of_samples(
    state: _State,
    formulation: Formulation,
    sides: int,
    steps_between: float,
    total_steps: int | None,
) -> tuple[float, float]:
    """P, and how far an update moves λ at most, of a constraint on each sample."""
    unit = state.unit or 0.0
    waiting = float(TEN)
    if not formulation.signed:
        waiting = _waiting(state.share, sides, total_steps)
    lead = LEAD * min(1.0, 2 * TEN / waiting)
    growth = state.largest / state.mean if state.mean else 1.0
    few = _of_few(state.share, sides, _most_of_few(steps_between, total_steps))
    of_few = lead * few * min(unit, state.first_unit)
    pull = max(lead * growth * unit + state.multiplier, of_few)
    pull = min(pull, TEN**2 * unit)
    if formulation.scope == "none":  # It has no λ.
        return pull, 0.0
    part = min(1.0, steps_between / waiting)
    divisor = 4 if formulation.signed else sides
    return pull, part * min(PATIENCE * pull, TEN * unit) / divisor


class GradientUnits:
    """Λ and r of the constraints whose formulation is ``adaptive``, and the α that follows."""

    def __init__(self) -> None:
        self.not_finite = 0
        self._states: dict[str, _State] = {}
        self._next = 0  # The step of the next measurement.

    def in_force(
        self,
        declared: Mapping[str, Formulation],
        constraints: Mapping[str, Constraint],
        steps_between: float = math.inf,
        total_steps: int | None = None,
    ) -> dict[str, Formulation]:
        """The formulations with α a number; until something is violated, of λ alone.

        α = P/2r; of a statistic α = 3Λ/2r and η = 0.1Λ/r, as its λ moves in every step.

        ``steps_between``: steps of the weights from one update of a sample's λ to the next.
        ``total_steps``: of the whole run; None where that is not known.
        """
        in_force = dict(declared)
        for name, formulation in declared.items():
            if not (isinstance(formulation, Ascending) and formulation.adaptive):
                continue
            state = self._states.get(name, _State())
            unit, size = state.unit or 0.0, state.size or 0.0
            sides = constraints[name].sides
            if formulation.scope == "batch":
                pull, step, margin = 3 * unit, STANDARD_STEP * unit, 0.0
            else:
                pull, step = _of_samples(
                    state, formulation, sides, steps_between, total_steps
                )
                margin = 0.0 if formulation.signed else MARGIN * size
            priced = unit * _of_few(state.share, sides, TEN)
            scale = Scale(reach=size, unit=priced)
            if pull and size:
                scale = Scale(pull / (2 * size), step / size, size, margin, priced)
            in_force[name] = formulation.scaled(scale)
        return in_force

    @property
    def next_step(self) -> int:
        """The step of the next measurement."""
        return self._next

    def unit(self, name: str) -> float | None:
        """Λ of a constraint; None where its formulation is not adaptive, or needed none yet."""
        return self._states.get(name, _State()).unit

    def due(self, declared: Mapping[str, Formulation], step: int) -> list[str]:
        """The constraints whose Λ this step measures before it is taken."""
        names = [name for name, formulation in declared.items() if formulation.adaptive]
        if not names:
            return []
        if step >= self._next:
            period = math.ceil((1 + len(names)) / COST)
            self._next = step + min(max(1, step), period)
            return names
        # Violated for the first time since the last measurement.
        known = [(name, self._states[name]) for name in names if name in self._states]
        return [name for name, state in known if state.steps and not state.tried]

    def measure(
        self, name: str, objective: float, violations: float, size: float
    ) -> None:
        """Takes the norms of ∇ mean ℓ₀ and ∇ mean v over the violated values, of ``size`` r."""
        state = self._states.setdefault(name, _State())
        state.tried = True
        if not (math.isfinite(objective) and math.isfinite(violations)):
            self.not_finite += 1
            return
        if violations == 0:
            return
        state.size = size if state.size is None else state.size
        # At its minimum: it tells no unit, and any pull moves the weights.
        if objective == 0:
            if not state.measurements:
                state.unit = 1 / violations
            return
        unit = objective / violations
        if state.unit is None:
            state.first_unit = unit
        if state.unit is None or not state.measurements:
            log.info('The unit of the multipliers of "%s" starts at %.3g.', name, unit)
            state.unit = unit
        else:  # One batch is noise.
            state.unit = (state.unit + unit) / 2
        state.measurements += 1

    def add(
        self,
        measured: Measured,
        declared: Mapping[str, Formulation],
        in_force: Mapping[str, Formulation],
        steps_an_epoch: float,
    ) -> None:
        """Adds a step's values, of all ranks and micro-batches, to the running means."""
        for name, formulation in in_force.items():
            mask = measured.masks[name]
            if not declared[name].adaptive or not mask.any():
                continue
            violation = measured.followed[name]
            table = measured.multipliers.get(name)
            multiplier = (torch.zeros_like(violation) if table is None else table)[mask]
            violation = violation[mask]
            values = _Values(
                violated=(violation != 0) if formulation.signed else violation > 0,
                residual=formulation.residual(violation, multiplier).double(),
                multiplier=multiplier,
            )
            # Without multipliers nothing comes back at a sample's next visit, as in a stream.
            epoch = math.inf if declared[name].scope == "none" else steps_an_epoch
            _add(self._states.setdefault(name, _State()), values, epoch)

    def state_dict(self) -> dict[str, Any]:
        states = {name: asdict(state) for name, state in self._states.items()}
        return {"next": self._next, "not_finite": self.not_finite, "states": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next, self.not_finite = int(state["next"]), int(state["not_finite"])
        # A state of before has no first unit; its rule had the present one in that place.
        self._states = {
            name: _State(**{"first_unit": of["unit"] or 0.0, **of})
            for name, of in state["states"].items()
        }


def norm_of(gradients: Iterable[Tensor]) -> float:
    """The norm of a gradient in parts, the same in whatever order they are."""
    norms = [torch.linalg.vector_norm(part.detach()) for part in gradients]
    whole = [getattr(norm, "full_tensor", lambda norm=norm: norm)() for norm in norms]
    if not whole:
        return 0.0
    return math.sqrt(math.fsum(float(n) ** 2 for n in torch.stack(whole).tolist()))


def leaves_of(value: Tensor) -> Iterator[Tensor]:
    """The weights that a value depends on."""
    nodes, seen = [value.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes += [following for following, _ in node.next_functions]
