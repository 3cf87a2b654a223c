"""What the values of a loss and its steps show to be a mistake, at every door alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..constraint import Constraint
from ..errors import TrainingError, Words
from ..formulations import Formulation
from ..report.history import History
from .terms import OBJECTIVE, Terms, over_ranks

Warn = Callable[[str], None]
"""Takes a warning."""


@dataclass
class Door:
    """How a door calls its parts, for what errors advise."""

    objective: str = "what computes it"
    values: str = "what computes them"
    instead: str = "What is only measured is no constraint."
    remedy: str = (
        "call constrained.multipliers.reset({name!r}); of a state, del "
        'state["multipliers"][{name!r}] before it is loaded'
    )
    words: Words = field(
        default_factory=lambda: Words(
            objective="objective",
            values="values",
            masks="masks",
            strict="strict",
            index="index",
            owner="constrained",
        )
    )


class Checks:
    """Finds values that cannot be trained, and positions and values that are not what they claim.

    Args:
        constraints, formulations: by name.
        door: how errors call what is to be changed.
    """

    def __init__(
        self,
        constraints: Mapping[str, Constraint],
        formulations: Mapping[str, Formulation],
        door: Door,
    ) -> None:
        self.constraints, self.formulations = dict(constraints), formulations
        self.door = door
        self.expects_all = True  # Whether a run comes past all samples.
        # Terms of which no sample has been seen yet.
        self.unproven = {OBJECTIVE}
        for name, formulation in formulations.items():
            if formulation.needs_gradient:
                self.unproven.add(name)
        self._said = set[str]()

    # The values of a batch ----------------------------------------------------------------------

    def of_terms(self, terms: Terms, warn: Warn, together: bool = False) -> None:
        """Refuses values without a gradient, in the first batch that a term applies to.

        together: whether all ranks call it at once; then a gradient on one of them is enough, as
            of a rank whose samples need no forward pass.
        """
        names = sorted(self.unproven)
        values = {OBJECTIVE: terms.objective, **terms.followed}
        # Constraints alone may be trained, with an objective of zeros.
        no_objective = bool(self.formulations) and not terms.objective.any()
        # By term whether it applies to a sample, and whether it has a gradient.
        flags = []
        for name in names:
            has_gradient = values[name].requires_grad
            spared = name == OBJECTIVE and no_objective
            flags.append([bool(terms.masks[name].any()), has_gradient or spared])
        if together:
            device = terms.objective.device
            of_rank = torch.tensor(flags, dtype=torch.float32, device=device)
            flags = over_ranks(of_rank, "max").bool().tolist()
        for name, (applies, trained) in zip(names, flags, strict=True):
            if not applies:
                continue
            self.unproven.discard(name)
            if name != OBJECTIVE:
                _warn_of_broadcasting(name, values[name], warn)
            if not trained:
                raise self._no_gradient(name)

    def _no_gradient(self, name: str) -> TrainingError:
        term = "The objective" if name == OBJECTIVE else f'Constraint "{name}"'
        where = self.door.objective if name == OBJECTIVE else self.door.values
        return TrainingError(
            f"{term}: its values have no gradient. In {where}, look for torch.no_grad(), "
            f".detach(), an argmax, a comparison, or a frozen part. {self.door.instead}"
        )

    # What the steps until now show --------------------------------------------------------------

    def of_steps(self, history: History, warn: Warn) -> None:
        """Looks at what all steps of a run measured, of a stream at nothing."""
        if not history.samples:
            return
        history.read()
        self._warn_of_few_positions(history, warn)
        for name, constraint in self.constraints.items():
            self._warn_of_clamped_values(name, constraint, history, warn)

    def _warn_of_few_positions(self, history: History, warn: Warn) -> None:
        """Of an index that is the place in the batch, or of samples that were counted too high."""
        seen, samples = int(history.seen.sum()), history.samples
        # Drawn at random, with replacement, positions come 1.4 times before half of them was seen.
        if not self.expects_all or 2 * seen >= samples or history.rows < 3 * seen:
            return
        self._warn_once(
            warn,
            "index",
            f"{history.rows:,} samples had only {seen:,} of the {samples:,} positions of the "
            "training set, so few multipliers serve all. Is index the place in the batch? It must "
            "be each sample's position in the training set; or is the number of samples too large?",
        )

    def _warn_of_clamped_values(
        self, name: str, constraint: Constraint, history: History, warn: Warn
    ) -> None:
        """Of max(0, ℓ − ε) that is given as ℓ, from which ε is then taken once more."""
        bound = constraint.at_most
        if bound is None or bound <= 0 or constraint.at_least is not None:
            return
        if history.rows < 2 * history.samples:
            # Before, values may be 0 as a model is its own reference at the start.
            return
        violation = history.last[name]
        value = violation[~violation.isnan()] + bound
        zero = value.abs() <= 1e-6 * bound
        share = float(zero.float().mean()) if len(value) else 0.0
        if 0.25 <= share < 1 and bool((value[~zero] > 0).all()):
            self._warn_once(
                warn,
                name,
                f'Constraint "{name}": {share:.0%} of its values are exactly 0, and none is below, '
                "as of violations that were clamped at 0. Give the values themselves: the bound "
                f"{bound:g} is compared here. Of a hinge loss this is as it should be.",
            )

    def _warn_once(self, warn: Warn, what: str, sentence: str) -> None:
        if what not in self._said:
            self._said.add(what)
            warn(sentence)


def _warn_of_broadcasting(name: str, values: Tensor, warn: Warn) -> None:
    if 2 < len(values) == values.shape[1]:
        warn(
            f'Constraint "{name}" has as many values a sample as the batch has samples: '
            "if that is not meant, (B, 1) was put against (B,) and broadcast."
        )
