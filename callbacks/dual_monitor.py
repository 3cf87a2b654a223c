"""Logs the multipliers and how far from an optimum they are: ``dual/{constraint}/{statistic}``.

``multiplier_q50`` ``_q90`` ``_q99`` ``_max`` and ``active`` (share of λ ≠ 0) of λ; and of the dual
steps of the epoch how far they are from an optimum. At one v ≤ u* and λ(v − u*) = 0, with u* the
relaxation of the formulation (0 where it has none). With r = v − u* and the λ after the step, over
the entries (sample and column) that stepped:

    step                mean |Δλ|
    slackness           mean |λr|
    infeasibility_mean  mean (r)₊, of an equality |r|
    relaxed             share with u* ≠ 0; only where the formulation relaxes

A constraint with one multiplier is met by a statistic of the batch, such as its mean, which varies
from batch to batch; so r is averaged over the epoch's steps before it is measured.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from pl_pointwise.formulations import Formulation
from pl_pointwise.lagrangian.terms import DualStep
from pl_pointwise.metrics import quantiles
from pl_pointwise.task import log_of_all_ranks

QUANTILES = {"q50": 0.5, "q90": 0.9, "q99": 0.99, "max": 1.0}


class DualMonitor(Callback):
    """Once an epoch, for every constraint that has multipliers: the table of docs/callbacks.md.

    Quantiles and ``active`` run over the entries of λ that have taken a step so far in the run. A
    window of ``primal_steps`` still open at the end of an epoch counts in the next.

    Args:
        every_n_steps: report after so many steps, and after the last one, instead of once an epoch.

    Raises:
        ValueError: a number below 1.

    >>> from lightning.pytorch import Trainer
    >>> from pl_pointwise.callbacks import DualMonitor
    >>> callback = DualMonitor(every_n_steps=50)
    >>> trainer = Trainer(accelerator="cpu", logger=False, callbacks=[callback])
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(
                f"every_n_steps={every_n_steps}: give a number from 1, or null."
            )
        self.every_n_steps = every_n_steps
        self._sums: dict[str, dict[str, Tensor]] = {}
        self._visited: dict[str, Tensor] = {}

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self.every_n_steps is None or trainer.global_step == 0:
            self._sums = {}
        # A resumed run goes on with the sums of its checkpoint.
        if trainer.global_step == 0:
            self._visited = {}  # Those of an earlier fit.

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        for name, step in pl_module.dual_steps.items():
            sums = self._sums.setdefault(name, {})
            for key, value in _sums_of(step, pl_module.in_force(name)).items():
                replaces = key == "multiplier" or key not in sums
                sums[key] = value.double() if replaces else sums[key] + value
            visited = self._visited_of(name, pl_module.multipliers[name].shape)
            if step.index is None:  # The one multiplier of a statistic.
                visited.fill_(True)
            else:
                visited[step.index] |= step.mask
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            self._log_steps(trainer, pl_module)

    def _visited_of(self, name: str, shape: torch.Size) -> Tensor:
        """Which entries of λ have taken a step; none yet of a table of another shape."""
        visited = self._visited.get(name)
        # Of another data set than before: it begins anew.
        if visited is None or visited.shape != shape:
            visited = torch.zeros(shape, dtype=torch.bool)
            self._visited[name] = visited
        return visited

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self.every_n_steps is None:
            log_of_all_ranks(pl_module, self._statistics(pl_module))

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self.every_n_steps is not None:
            self._log_steps(trainer, pl_module)

    def _log_steps(self, trainer: Trainer, pl_module: Any) -> None:
        """Past log_every_n_steps, by which Lightning would leave out what is logged in a step."""
        if not self._sums:
            return  # Since the last report no dual step was taken.
        statistics = self._statistics(pl_module)  # Alike on all ranks.
        self._sums = {}
        for name, value in statistics.items():
            trainer.callback_metrics[name] = torch.tensor(value)
        for logger in trainer.loggers:
            logger.log_metrics(statistics, step=trainer.global_step)

    def _statistics(self, pl_module: Any) -> dict[str, float]:
        """Of the dual steps that the sums are of, by key."""
        shown = dict[str, float]()
        for name, sums in self._sums.items():
            means = _means(sums, pl_module.formulations[name])
            multipliers = pl_module.multipliers[name][self._visited[name]]
            at = quantiles(multipliers, [*QUANTILES.values()]).tolist()
            for key, value in means.items():
                shown[f"dual/{name}/{key}"] = float(value)
            for key, quantile in zip(QUANTILES, at, strict=True):
                shown[f"dual/{name}/multiplier_{key}"] = float(quantile)
            shown[f"dual/{name}/active"] = float((multipliers != 0).double().mean())
        return shown

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self._sums, "visited": self._visited}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._sums = state_dict["sums"]
        self._visited = state_dict["visited"]


def _means(sums: dict[str, Tensor], formulation: Formulation) -> dict[str, Tensor]:
    """What the sums of dual steps say, over the entries that stepped."""
    entries = sums["entries"]
    # Each entry has its own residual; a statistic's is noisy within a step.
    if "statistic" not in sums:
        return {key: total / entries for key, total in sums.items() if key != "entries"}
    # Of a statistic, which varies from batch to batch, r is averaged before it is measured.
    residual = sums["statistic"] / sums["steps"]
    return {
        "step": sums["step"] / entries,
        "slackness": (sums["multiplier"] * residual).abs().mean(),
        "infeasibility_mean": _excess(residual, formulation).mean(),
    }


def _sums_of(step: DualStep, formulation: Formulation) -> dict[str, Tensor]:
    """What a dual step adds to the sums of its epoch; of the multiplier the last counts."""
    moved = (step.after - step.before).abs()
    if step.index is None:
        return {
            "entries": torch.tensor(step.judged.shape[1]),
            "steps": torch.tensor(1),
            "step": moved.sum(),
            "statistic": step.judged[0],
            "multiplier": step.after[0],
        }
    residual = step.judged[step.mask]
    multiplier = step.after[step.mask]
    sums = {"entries": step.mask.sum(), "step": moved[step.mask].sum()}
    relaxation = getattr(formulation, "relaxation", None)
    # Relaxed formulations stop at u*: what is left beyond it is the residual.
    if relaxation is not None:
        relaxed = relaxation(step.judged, step.after)[step.mask]
        residual = residual - relaxed
        sums["relaxed"] = (relaxed != 0).sum()
    sums["slackness"] = (multiplier * residual).abs().sum()
    sums["infeasibility_mean"] = _excess(residual, formulation).sum()
    return sums


def _excess(residual: Tensor, formulation: Formulation) -> Tensor:
    """By how much an inequality (r ≤ 0) or an equality (r = 0) is missed."""
    return residual.abs() if formulation.signed else residual.clamp(min=0)
