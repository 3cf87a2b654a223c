"""What a run knows between two steps: of which data, how λ moves, and what it has learned.

Made, started again on other data, fitted to other formulations, saved and loaded. The engine
(lagrangian.py) derives from it, and takes the steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..constraint import Constraint
from ..errors import TrainingError
from ..formulations import Formulation
from ..multipliers import Multipliers
from ..report.history import History
from .batch_scope import PerBatch
from .checks import Checks, Door, Warn
from .gradient_units import GradientUnits
from .group_means import MeansOfConstraints
from .group_scopes import OnMeans, PerGroup, PerGroupMean, UnweightedMeans
from .prices import Step
from .scopes import Context, PerSample, PerSampleButShare, Scope, Unweighted
from .shares import Share, refuse_shares, refuse_stream
from .terms import DualStep, Layout, Measured
from .trained import keep_buffers_of_compiled_graphs


class LagrangianState:
    """λ of a training set, with all that moves it.

    Args:
        constraints: by name.
        formulations: of the constraints that are enforced.
        samples: N, of the training set; 0 of a stream, or until it is known.
        groups: (N,), the number of each sample's group; None where λ is a sample's.
        primal_steps: steps of the weights per dual step.
        dual_first: whether the weights follow λ after this step's update.
        total_steps: of the weights in the whole run; None where that is not known.
        warn: takes a warning.
        door: how errors call the parts of what drives it.

    Attributes:
        multipliers, thresholds: λ and t by constraint.
        scopes: what ψ acts on, by constraint; ``on_batch`` and ``on_means`` are those of them that
            act on a statistic of the batch, and on means of groups.
        units: Λ and r of the formulations that find their own α.
        means: of the groups, where bounds are on them; else None.
        shares: by constraint who is exempt, where a share may violate.
        needs_others: whether the term of a sample depends on other samples, by ``means`` or
            ``shares``: what the engine's ``see`` is for.
        history: what all steps measured.
        fingerprint: of the training set that the multipliers belong to.
        in_force: the formulations with α a number, of the last step.
        measured, dual_steps: what the last step measured, and the dual step that it ended in.
        steps: that the weights have taken.
        layout: of the rows that the last micro-batch shared.
    """

    def __init__(
        self,
        constraints: Mapping[str, Constraint],
        formulations: Mapping[str, Formulation],
        *,
        samples: int,
        groups: Tensor | None,
        primal_steps: int,
        dual_first: bool,
        total_steps: int | None,
        warn: Warn,
        door: Door,
    ) -> None:
        self.constraints = dict(constraints)
        self.samples = samples
        self.total_steps = total_steps
        self.warn = warn
        self.door = door
        owners = samples if groups is None else int(groups.max()) + 1
        self.multipliers = Multipliers(owners)
        self.thresholds = dict[str, Tensor]()
        self.means: MeansOfConstraints | None = None
        # Of a state, until the groups are known.
        self._saved_means: Mapping[str, Any] = {}
        self.shares = self._new_shares(samples)
        self.configure(formulations, primal_steps, dual_first, groups)
        self.units = GradientUnits()
        self.fingerprint: str | None = None
        self.history = History(self.constraints, samples)
        # The updated samples of the steps since the last dual step.
        self._window: list[dict[str, list[Tensor]]] = []
        # What the engine writes in a step.
        self.in_force: dict[str, Formulation] = {}
        self.measured: Measured | None = None
        self.dual_steps: dict[str, DualStep] = {}
        self.steps = 0
        self.layout: Layout = {}
        self._last: Step | None = None
        self._flat: set[str] = set()  # Constraints that were found without a gradient.

    # How λ moves, and whose it is ---------------------------------------------------------------

    def configure(
        self,
        formulations: Mapping[str, Formulation],
        primal_steps: int,
        dual_first: bool,
        groups: Tensor | None,
    ) -> None:
        """How λ moves from now on, and whose it is.

        Raises:
            TrainingError: groups with ``dual_first``, or with a formulation that acts on |ℓ − c| of
                an equality; a share with groups, or under a formulation without λ of samples.
        """
        refuse_shares(self.constraints, formulations, groups)
        self.formulations = formulations
        self.groups = groups
        self.checks = Checks(self.constraints, formulations, self.door)
        if any(formulation.adaptive for formulation in formulations.values()):
            # Measuring Λ differentiates a graph once more.
            keep_buffers_of_compiled_graphs()
        self.primal_steps = primal_steps
        self.dual_first = dual_first
        self._make_means(self.means)
        self._hold(self.multipliers, self.thresholds)
        if dual_first and any(isinstance(s, PerGroup) for s in self.scopes.values()):
            raise TrainingError(
                'order="dual_first" with groups: a group\'s λ follows the mean of its violations, '
                'which a batch\'s loss would need first. Take order="simultaneous".'
            )
        for name in self.on_means:
            if self.constraints[name].is_equality and not formulations[name].signed:
                raise TrainingError(
                    f'Constraint "{name}": {formulations[name]} acts on |ℓ − c|, whose mean over a '
                    "group is not how far the group's mean is from c. Take Pointwise or Relaxed, "
                    "or Constraint(equals=…, each_sample=True)."
                )

    def _hold(self, multipliers: Multipliers, thresholds: dict[str, Tensor]) -> None:
        """Keeps other λ and t, and the scopes, which act on them."""
        self.multipliers = multipliers
        self.thresholds = thresholds
        multipliers.groups = self.groups
        multipliers.words = self.door.words
        context = Context(
            multipliers=multipliers,
            thresholds=thresholds,
            dual_first=self.dual_first,
            groups=self.groups,
            means=self.means,
            shares=self.shares,
        )
        self.scopes = {
            name: scope_of(name, self.constraints[name], formulation, context)
            for name, formulation in self.formulations.items()
        }
        self.on_batch = {
            name: scope
            for name, scope in self.scopes.items()
            if isinstance(scope, PerBatch)
        }
        self.on_means = {
            name: scope
            for name, scope in self.scopes.items()
            if isinstance(scope, OnMeans)
        }
        self.needs_others = bool(self.on_means or self.shares)

    @property
    def bounds_on_means(self) -> list[str]:
        """The constraints whose bound is on the mean of each group."""
        if self.groups is None:
            return []
        return [
            name for name, bound in self.constraints.items() if not bound.each_sample
        ]

    # At the start of a fit ----------------------------------------------------------------------

    def start(
        self, samples: int, fingerprint: str | None, resumed: bool, first: bool
    ) -> None:
        """Keeps the multipliers if they belong to this training set, or starts them again.

        samples, fingerprint: of the training set; 0 and None of a stream. resumed: whether they are
        a checkpoint's. first: whether steps are counted from 0 by a fit that is not resumed.
        """
        if not samples:
            refuse_stream(self.constraints)
        # Of a checkpoint's own training set the caller has made sure.
        if not resumed and fingerprint != self.fingerprint:
            if self.fingerprint is not None and samples:
                self.warn(
                    "Another training set than before: the multipliers start at 0 again."
                )
            owners = samples if self.groups is None else int(self.groups.max()) + 1
            self.means = None
            self._make_means(None)
            self.shares = self._new_shares(samples)
            self._hold(self.multipliers.for_samples(owners), {})
            self.units, self._window = GradientUnits(), []
        if not resumed:
            self.history = History(self.constraints, samples)
        self.fingerprint = fingerprint
        self.fit_tables()
        if first:  # What was measured stays until it is measured again.
            self.units.load_state_dict({**self.units.state_dict(), "next": 0})

    def fit_tables(self) -> None:
        """Fits multipliers and thresholds to the formulations of now.

        λ of before is kept under another formulation of the same scope, and dropped, with a
        warning, without one.

        Raises:
            TrainingError: one λ for a constraint where each sample has one, or the other way round;
                a λ below 0 of an inequality.
        """
        self._fit_multipliers()
        # What was reset takes no step from values of before, nor from a threshold of before.
        window = []
        for visits in self._window:
            kept = {name: visits[name] for name in visits if name in self.multipliers}
            window.append(kept)
        self._window = window
        for name in [*self.thresholds]:
            learns = (
                name in self.formulations and self.formulations[name].learns_threshold
            )
            if name not in self.multipliers or not learns:
                del self.thresholds[name]

    def _fit_multipliers(self) -> None:
        """Keeps, drops or refuses λ of each constraint, those that were set included."""
        multipliers = self.multipliers
        # Set before a checkpoint was loaded, which has its own.
        for name in set(multipliers).intersection(multipliers.pending()):
            self.warn(
                f'Multipliers of "{name}" are the checkpoint\'s, not those that were set.'
            )
            del multipliers.pending()[name]
        for name in [*multipliers, *multipliers.pending()]:
            formulation = self.formulations.get(name)
            dimensions = None if formulation is None else self.scopes[name].dimensions
            if formulation is None or dimensions is None:
                what = (
                    "no such constraint" if formulation is None else repr(formulation)
                )
                self.warn(
                    f'Multipliers of "{name}" are dropped: {self.door.words.owner} has {what}.'
                )
                multipliers.reset(name)
                continue
            table = multipliers.get(name)
            if table is None:
                # Its shape is not known before the first step, its sign is.
                table = multipliers.pending()[name]
            elif (table.dim() == 2) != (dimensions == 2):
                kind = "sample" if table.dim() == 2 else "constraint"
                raise TrainingError(
                    f'Constraint "{name}": its multipliers are one per {kind}, and those of '
                    f"{formulation} are not. Start them again from 0: "
                    f"{self.door.remedy.format(name=name)}."
                )
            if not formulation.signed and (table < 0).any():
                raise TrainingError(
                    f'Constraint "{name}" has multipliers below 0, which only an equality has. '
                    f"Set others, or start them from 0: {self.door.remedy.format(name=name)}."
                )

    def _make_means(self, known: MeansOfConstraints | None) -> None:
        """Those of these groups and constraints; those of a state once the groups are known."""
        self.means = None
        if self.groups is None or not self.bounds_on_means:
            return
        # A fit that goes on with the same groups keeps what it has seen.
        if known is not None and known.groups.equal(self.groups):
            self.means = known
            return
        self.means = MeansOfConstraints(self.groups, self.bounds_on_means)
        if self._saved_means:
            self.means.load_state_dict(self._saved_means)
            self._saved_means = {}

    def _new_shares(self, samples: int) -> dict[str, Share]:
        """Of the constraints that a share of the samples may violate, without a value yet."""
        return {
            name: Share(samples, bound.share)
            for name, bound in self.constraints.items()
            if bound.share is not None
        }

    # In a checkpoint ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """λ and all that moves it, tensors and plain values; between two steps."""
        self.history.read()
        return {
            "samples": self.multipliers.samples,
            "multipliers": self.multipliers.state_dict(),
            "thresholds": dict(self.thresholds),
            "gradient_units": self.units.state_dict(),
            "fingerprint": self.fingerprint,
            "window": self._window,
            "group_means": self.means.state_dict() if self.means else self._saved_means,
            "shares": {name: share.state_dict() for name, share in self.shares.items()},
            "history": self.history.state_dict(),
        }

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Within it a state is loaded whole, or what an error leaves half loaded is undone."""
        before = dict(vars(self))
        try:
            yield
        except BaseException:
            vars(self).update(before)
            raise

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from :meth:`state_dict`, to the bit."""
        multipliers = self.multipliers.for_samples(int(state["samples"]))
        multipliers.load_state_dict(state["multipliers"])
        thresholds = {
            name: value.to("cpu", torch.float32, copy=True)
            for name, value in state["thresholds"].items()
        }
        self._saved_means = state.get("group_means", {})  # Older ones had none.
        self._make_means(None)
        self.shares = self._new_shares(multipliers.samples)
        for name, kept in state.get("shares", {}).items():
            if name in self.shares:
                self.shares[name].load_state_dict(kept)
        self._hold(multipliers, thresholds)
        units = GradientUnits()
        units.load_state_dict(state["gradient_units"])
        self.units = units
        self._window = [dict(visits) for visits in state["window"]]
        self.fingerprint = state["fingerprint"]
        # The rows of a state without a history: of groups λ has fewer than there are samples.
        samples = self.samples if self.groups is not None else multipliers.samples
        self.history = History.from_state(
            self.constraints, samples, state.get("history")
        )


def scope_of(
    name: str, constraint: Constraint, formulation: Formulation, context: Context
) -> Scope:
    """What the formulation of a constraint acts on."""
    kinds: dict[str, type[Scope]] = {
        "sample": PerSample,
        "batch": PerBatch,
        "none": Unweighted,
    }
    if name in context.shares:
        kinds["sample"] = PerSampleButShare
    elif context.groups is not None and constraint.each_sample:
        kinds["sample"] = PerGroup
    elif context.groups is not None:
        kinds |= {"sample": PerGroupMean, "none": UnweightedMeans}
    return kinds[formulation.scope](name, constraint, formulation, context)
