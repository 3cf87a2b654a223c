"""``validate`` and ``test``: one full pass over every data set; nothing is learned."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torchmetrics import Metric

from .certificates import worst_per_sample
from .data import dataset_of, groups_of
from .errors import explain_gradient_errors
from .lagrangian.group_means import means_of_groups
from .lagrangian.terms import OBJECTIVE, widest
from .metrics import pool, share_violated, violation_statistics
from .report.closing_table import HeldOut
from .task import Task, judges_strictly, log_of_all_ranks, objects_of_all_ranks, warn
from .training.micro_batches import micro_batches_of, terms_of


@dataclass(frozen=True)
class SampleViolations:
    """Violations of one constraint after a full pass, of all ranks, on the CPU.

    A row per sample that the constraint applies to, in data-set order. Of an interval the larger
    of both sides. Where the bound is on means of groups, statistics are of these.

    >>> from pl_pointwise.evaluation import SampleViolations
    >>> violation = torch.tensor([[-1.0, 2.0], [-3.0, -2.0]])
    >>> found = SampleViolations(torch.arange(2), violation, violation < 9)
    >>> found.worst(), round(float(found.statistics()["violated"]), 2)
    (tensor([ 2., -2.]), 0.25)
    """

    index: Tensor  #: (n,) int64, each sample's position in its data set
    violation: Tensor  #: (n, K), positive violates; NaN where it does not apply
    mask: Tensor  #: bool, (n, K): which elements it applies to
    #: (G, K), of the mean of each group that is bounded; or NaN
    by_group: Tensor | None = None

    def pooled(self) -> Tensor:
        """(m,), the elements that the constraint applies to, one after the other; or groups'."""
        if self.by_group is not None:
            return self.by_group[~self.by_group.isnan()]
        return self.violation[self.mask]

    def worst(self) -> Tensor:
        """(n,), the largest violation of each sample: what to certify (certificates.py)."""
        return worst_per_sample(self.violation, self.mask)

    def worst_of_bounded(self) -> Tensor:
        """The same of each group where the bound is on their means."""
        if self.by_group is None:
            return self.worst()
        return worst_per_sample(self.by_group, ~self.by_group.isnan())

    def statistics(self) -> dict[str, Tensor]:
        """Statistics of the values; with several per sample ``violated_samples`` too."""
        statistics = violation_statistics(self.pooled())
        if self.by_group is not None or self.violation.shape[1] == 1:
            return statistics
        ordered = {}
        for name, value in statistics.items():
            if name == "violated":  # In front of that of the values.
                ordered["violated_samples"] = share_violated(self.worst())
            ordered[name] = value
        return ordered


@dataclass(frozen=True)
class SampleValues:
    """A metric's value of each sample."""

    index: Tensor  #: (n,)
    value: Tensor  #: (n,)


class ViolationsBySample:
    """Collects violations with the index of their samples; K may vary."""

    def __init__(self) -> None:
        self._batches: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, index: Tensor, violation: Tensor, mask: Tensor) -> None:
        """Adds a batch: (b,), (b, K) and bool alike; True counts."""
        rows, columns = mask.nonzero(as_tuple=True)
        value = pool(violation.detach()[rows, columns])
        self._batches.append((index.to(value.device)[rows], columns, value))

    def samples(self) -> SampleViolations:
        """Those of all ranks, each counted once. A collective: every rank calls it."""
        of_this_rank = [
            torch.cat(part).cpu() for part in zip(*self._batches, strict=True)
        ]
        of_all = [of_rank for of_rank in objects_of_all_ranks(of_this_rank) if of_rank]
        if not of_all:
            empty = torch.zeros(0, 1)
            return SampleViolations(empty[:, 0].long(), empty, empty.bool())
        index, column, value = (torch.cat(part) for part in zip(*of_all, strict=True))
        width = int(column.max()) + 1 if len(column) else 1
        key = index * width + column
        order = key.argsort(stable=True)
        first = torch.ones_like(order, dtype=torch.bool)
        first[1:] = key[order][1:] != key[order][:-1]
        kept = order[first]  # Of each sample and element once.
        samples, row = index[kept].unique(return_inverse=True)
        violation = torch.full((len(samples), width), math.nan, dtype=value.dtype)
        mask = torch.zeros(violation.shape, dtype=torch.bool)
        violation[row, column[kept]] = value[kept]
        mask[row, column[kept]] = True
        return SampleViolations(samples, violation, mask)


class MeanBySample(Metric):
    """The mean over samples of one value each, kept with the index of its sample; NaN of none.

    A metric that a requirement can be about, where its values are within [0, 1]. A sample that
    several batches or ranks brought counts once.

    >>> from pl_pointwise.evaluation import MeanBySample
    >>> metric = MeanBySample()
    >>> metric.update(torch.tensor([0, 1]), torch.tensor([0.0, 1.0]))
    >>> metric.update(torch.tensor([1]), torch.tensor([1.0]))  # Sample 1 again: it counts once.
    >>> metric.compute()
    tensor(0.5000)
    """

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        super().reset()
        self._values = ViolationsBySample()

    def update(self, index: Tensor, value: Tensor) -> None:
        """Adds a batch: (b,) positions in the data set and (b,) values; −1 counts nowhere."""
        value = value.detach().to(widest(value.device))
        self._values.add(index, value[:, None], (index >= 0).to(value.device)[:, None])

    def forward(self, index: Tensor, value: Tensor) -> None:
        """Adds a batch too: torchmetrics' own keeps no more than the states that it knows."""
        self.update(index, value)

    def compute(self) -> Tensor:
        """The mean, the same on every rank. A collective: every rank calls it."""
        return self.samples().value.mean().float().to(self.device)

    def samples(self) -> SampleValues:
        """The values themselves. A collective: every rank calls it."""
        samples = self._values.samples()
        return SampleValues(samples.index, samples.pooled())


class Evaluation:
    """What is collected of one data set, ``stage`` in the log keys; made on every rank.

    groups: (N,), of each of its samples, on whose means bounds without ``each_sample`` are.
    """

    def __init__(self, stage: str, task: Task, groups: Tensor | None) -> None:
        self.stage = stage
        self.groups = groups
        self.objective = ViolationsBySample()
        self.bounds = task.evaluation_constraints
        by_group = []
        if groups is not None:
            by_group = [name for name in self.bounds if not each_sample(task, name)]
        self.residuals = {name: ViolationsBySample() for name in by_group}
        self.signed = [name for name in by_group if self.bounds[name].is_equality]
        self.violations = {
            name: ViolationsBySample() for name in task.evaluation_constraints
        }
        self.metrics = {}
        for name, metric in task.evaluation_metrics().items():
            self.metrics[name] = metric.to(task.device)

    def add(self, task: Task, batch: Any) -> None:
        """Adds a batch: no multiplier is read, none moves."""
        for micro in micro_batches_of(task, batch):
            outputs = task(micro.batch)
            strict = judges_strictly(task)
            terms = terms_of(
                task, micro, outputs, strict, evaluating=True, signed=self.signed
            )
            mask = terms.masks[OBJECTIVE]
            self.objective.add(micro.index, terms.objective[:, None], mask[:, None])
            for name, violation in terms.judged.items():
                constraint = task.evaluation_constraints[name]
                if name in self.residuals:
                    self.residuals[name].add(micro.index, violation, terms.masks[name])
                    violation = constraint.reported(violation)
                outside, applies = constraint.outside(violation, terms.masks[name])
                self.violations[name].add(micro.index, outside, applies)
            real = (micro.index >= 0).to(task.device)
            task.update_evaluation_metrics(
                self.metrics, outputs, micro.batch, real, self.stage
            )

    def results(
        self,
    ) -> tuple[dict[str, Tensor], dict[str, SampleViolations], dict[str, SampleValues]]:
        """What to log; violations and MeanBySample values by name. A collective over the ranks."""
        shown: dict[str, Tensor] = {}
        violations: dict[str, SampleViolations] = {}
        values: dict[str, SampleValues] = {}
        objective = self.objective.samples().pooled()
        if len(objective):
            shown["objective"] = objective.double().mean().float()
        for name, collected in self.violations.items():
            samples = collected.samples()
            if len(samples.index):  # It applied to some.
                if name in self.residuals:
                    samples = replace(samples, by_group=self._by_group(name))
                violations[name] = samples
                for statistic, value in samples.statistics().items():
                    shown[f"{name}/{statistic}"] = value
        for name, metric in updated_anywhere(self.metrics).items():
            shown[name] = metric.compute()
            if isinstance(metric, MeanBySample):
                values[name] = metric.samples()
        logged = {f"{self.stage}/{key}": value for key, value in shown.items()}
        return logged, violations, values

    def _by_group(self, name: str) -> Tensor:
        """(G, K), the violation of each group's means; NaN of one without a value."""
        constraint = self.bounds[name]
        samples = self.residuals[name].samples()
        assert self.groups is not None
        means = means_of_groups(samples.violation, self.groups[samples.index])
        violation, _ = constraint.outside(constraint.reported(means), ~means.isnan())
        return violation


def each_sample(task: Task, name: str) -> bool:
    """Whether a bound is on each sample where there are groups, or but for a share of them."""
    bounds = (task.constraints[name], task.evaluation_constraints[name])
    return any(bound.each_sample or bound.share is not None for bound in bounds)


def updated_anywhere(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Those that some rank updated, ready to be computed, which is a collective, on every rank.

    A rank that updated none of its own gets empty states of the other ranks' types.
    """
    of_this_rank = {}
    for name, metric in metrics.items():
        if metric.update_called:
            of_this_rank[name] = _empty_states(metric)
    for of_rank in objects_of_all_ranks(of_this_rank):
        for name, states in of_rank.items():
            metric = metrics[name]
            # Else it warns, and all is as it should.
            metric._update_count = metric._update_count or 1
            for state, empty in states.items():
                if not getattr(metric, state):
                    getattr(metric, state).append(empty.to(metric.device))
    return {name: metric for name, metric in metrics.items() if metric.update_called}


def _empty_states(metric: Metric) -> dict[str, Tensor]:
    """Of each state that is a list with entries, one without rows of their type."""
    empty = {}
    for state in metric._defaults:
        entries = getattr(metric, state)
        if isinstance(entries, list) and entries:
            empty[state] = torch.atleast_1d(entries[0])[:0].clone().cpu()
    return empty


BEFORE = "before_"
"""Begins the name of a data set that the starting model was measured on."""


def loaders_by_name(stage: str, loaders: Any) -> dict[str, Any]:
    """The data sets that a stage evaluates: by the names of a mapping, else numbered."""
    if isinstance(loaders, Mapping):
        return dict(loaders)
    if not isinstance(loaders, (list, tuple)):
        return {stage: loaders}
    if len(loaders) == 1:
        return {stage: loaders[0]}
    return {f"{stage}{number}": loader for number, loader in enumerate(loaders)}


class Evaluator:
    """``validate`` and ``test`` of a task, sample by sample."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._evaluations: dict[str, Evaluation] = {}
        # Of the starting model, by the same names.
        self._before: dict[str, Evaluation] = {}
        self.added = False  # Whether the running evaluation has had a batch.
        self._said = False  # A warning that comes once.
        self.forget()

    def forget(self) -> None:
        """Drops results of other weights, or of a sanity check's batches."""
        self.violations: dict[str, dict[str, Tensor]] = {}
        self.evaluated: dict[str, dict[str, SampleViolations]] = {}
        self.evaluated_metrics: dict[str, dict[str, SampleValues]] = {}
        self.datasets: dict[str, Any] = {}  # That were evaluated, None for a stream.
        self.objectives: dict[str, float] = {}  # The mean of each data set.
        self.step: int | None = None  # Of the training, at the last evaluation.

    def start(self) -> None:
        """On every rank, whether or not it gets a batch: what follows at the end is collective."""
        trainer = self.task.trainer
        loaders = (
            trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
        )
        named = loaders_by_name("test" if trainer.testing else "val", loaders)
        self.datasets |= {stage: dataset_of(loader) for stage, loader in named.items()}
        known = {stage: self.datasets[stage] for stage in named}
        groups = {
            s: None if rows is None else groups_of(rows) for s, rows in known.items()
        }
        self._warn_of_samples(groups)
        self._evaluations = {s: Evaluation(s, self.task, groups[s]) for s in named}
        self._before = {}
        if (
            trainer.state.fn != TrainerFn.FITTING
            and self.task.starting_model() is not None
        ):
            self._before = {
                s: Evaluation(f"{BEFORE}{s}", self.task, groups[s]) for s in named
            }
        self.added = False

    def _warn_of_samples(self, groups: Mapping[str, Tensor | None]) -> None:
        """Of data sets that do not say the groups on whose means training has bounds."""
        on_means = self.task._lagrangian.bounds_on_means
        missing = [stage for stage, numbers in groups.items() if numbers is None]
        if on_means and missing and not self._said:
            self._said = True
            warn(
                self.task,
                f"{', '.join(on_means)}: the bound is on the mean of each group, and the data of "
                f"{', '.join(missing)} have no groups, so each of their samples is judged by "
                "itself. Give them groups: IndexedDataset(rows, groups=…).",
            )

    def add(self, batch: Any, dataloader_idx: int) -> None:
        """Adds a batch of one of the data sets, by its number."""
        self.added = True
        with explain_gradient_errors():
            stage = [*self._evaluations][dataloader_idx]
            self._evaluations[stage].add(self.task, batch)
            start = self.task.starting_model() if stage in self._before else None
            if start is not None:
                with start:
                    self._before[stage].add(self.task, batch)

    def finish(self) -> None:
        """Computes and logs what was collected."""
        both = [*self._evaluations.values(), *self._before.values()]
        metrics = {evaluation.stage: evaluation.metrics for evaluation in both}
        self.task.finish_evaluation_metrics(metrics)
        for stage, evaluation in self._evaluations.items():
            shown, self.evaluated[stage], self.evaluated_metrics[stage] = (
                evaluation.results()
            )
            if f"{stage}/objective" in shown:
                self.objectives[stage] = float(shown[f"{stage}/objective"])
            pooled = {name: of.pooled() for name, of in self.evaluated[stage].items()}
            self.violations[stage] = pooled
            log_of_all_ranks(self.task, shown, add_dataloader_idx=False)
        for evaluation in self._before.values():
            shown, _, _ = evaluation.results()
            log_of_all_ranks(self.task, shown, add_dataloader_idx=False)
        self.step = self.task.global_step
        self._evaluations = {}
        self._before = {}

    def held_out(self) -> HeldOut | None:
        """What the last evaluation found, over all its data sets; None without one.

        Of several data sets the violations are taken together, and no objective is given.
        """
        worst: dict[str, list[Tensor]] = {}
        for by_name in self.evaluated.values():
            for name, violations in by_name.items():
                worst.setdefault(name, []).append(violations.worst_of_bounded())
        objectives = [*self.objectives.values()]
        if not worst and not objectives:
            return None
        return HeldOut(
            constraints=self.task.evaluation_constraints,
            worst={name: torch.cat(parts) for name, parts in worst.items()},
            objective=objectives[0] if len(objectives) == 1 else None,
            step=self.step,
        )
