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
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps}: give a number from 1, or null.")
        self.every_n_steps = every_n_steps
        self._sums: dict[str, dict[str, Tensor]] = {}
        self._visited: dict[str, Tensor] = {}

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self.every_n_steps is None or trainer.global_step == 0:
            self._sums = {}
        if trainer.global_step == 0:
            self._visited = {}  # Those of an earlier fit.

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        for name, step in pl_module.dual_steps.items():
            known = self._sums.setdefault(name, {})
            for key, value in _sums_of(step, pl_module._run.in_force(name)).items():
                last = key == "multiplier" or key not in known
                known[key] = value.double() if last else known[key] + value
            shape, visited = pl_module.multipliers[name].shape, self._visited.get(name)
            if visited is None or visited.shape != shape:
                visited = self._visited[name] = torch.zeros(shape, dtype=torch.bool)
            if step.index is None:
                visited.fill_(True)
            else:
                visited[step.index] |= step.mask
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            self._log_steps(trainer, pl_module)

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
        found = self._statistics(pl_module)  # Alike on all ranks.
        self._sums = {}
        trainer.callback_metrics.update({n: torch.tensor(value) for n, value in found.items()})
        for logger in trainer.loggers:
            logger.log_metrics(found, step=trainer.global_step)

    def _statistics(self, pl_module: Any) -> dict[str, float]:
        """Of the dual steps that the sums are of, by key."""
        shown = dict[str, float]()
        for name, sums in self._sums.items():
            multipliers = pl_module.multipliers[name][self._visited[name]]
            values = quantiles(multipliers, [*QUANTILES.values()]).tolist()
            entries, formulation = sums["entries"], pl_module.formulations[name]
            found = {key: total / entries for key, total in sums.items() if key != "entries"}
            if "statistic" in sums:
                residual = sums["statistic"] / sums["steps"]
                found = {
                    "step": found["step"],
                    "slackness": (sums["multiplier"] * residual).abs().mean(),
                    "infeasibility_mean": _excess(residual, formulation).mean(),
                }
            found |= {f"multiplier_{key}": v for key, v in zip(QUANTILES, values, strict=True)}
            found["active"] = (multipliers != 0).double().mean()
            shown |= {f"dual/{name}/{key}": float(value) for key, value in found.items()}
        return shown

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self._sums, "visited": self._visited}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._sums, self._visited = state_dict["sums"], state_dict["visited"]


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
    residual, multiplier = step.judged[step.mask], step.after[step.mask]
    found = {"entries": step.mask.sum(), "step": moved[step.mask].sum()}
    if relaxation := getattr(formulation, "relaxation", None):
        relaxed = relaxation(step.judged, step.after)[step.mask]
        residual, found["relaxed"] = residual - relaxed, (relaxed != 0).sum()
    found["slackness"] = (multiplier * residual).abs().sum()
    found["infeasibility_mean"] = _excess(residual, formulation).sum()
    return found


def _excess(residual: Tensor, formulation: Formulation) -> Tensor:
    """By how much an inequality (r ≤ 0) or an equality (r = 0) is missed."""
    return residual.abs() if formulation.signed else residual.clamp(min=0)
