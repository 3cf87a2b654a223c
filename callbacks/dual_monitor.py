"""Logs the multipliers and how far from an optimum they are: ``dual/{constraint}/{statistic}``.

``multiplier_q50`` ``_q90`` ``_q99`` ``_max``, ``active`` (share of λ ≠ 0); over the dual steps of
the epoch ``step``, ``slackness``, ``infeasibility_mean``, ``relaxed``, see
:class:`Convergence`; and ``share`` and ``overshoot`` of the pull, see
:class:`~pl_pointwise.multipliers.PullShares`: not where nothing was pulled. TensorBoard and
W&B get ``multipliers`` too, the histogram of λ.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from pl_pointwise.formulations import Formulation
from pl_pointwise.metrics import quantiles
from pl_pointwise.module import PointwiseModule
from pl_pointwise.step import DualStep
from pl_pointwise.task import log_of_all_ranks

from .logged import log_histogram

QUANTILES = (0.5, 0.9, 0.99, 1.0)


class DualMonitor(Callback):
    """Once an epoch, for every constraint that has multipliers.

    Quantiles and ``active`` run over the entries of λ that have taken a step so far in the run: a
    sample that does not carry the constraint has no say. The figures of the steps are those of this
    epoch; a window of ``primal_steps`` still open at its end counts in the next. A step costs
    O(batch), the end of an epoch O(number of multipliers).
    """

    def __init__(self) -> None:
        self._convergence = Convergence()
        self._visited: dict[str, Tensor] = {}

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0:  # Lightning leaves on_train_epoch_start out where a resume starts one.
            self._convergence = Convergence()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not isinstance(pl_module, PointwiseModule):
            return
        self._convergence.add(pl_module)
        for name, step in pl_module.dual_steps.items():
            table = pl_module.multipliers[name]
            visited = self._visited.get(name)
            if visited is None or visited.shape != table.shape:
                visited = self._visited[name] = torch.zeros(table.shape, dtype=torch.bool)
            if step.index is None:
                visited.fill_(True)
            else:
                visited[step.index] |= step.mask

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(pl_module, PointwiseModule):
            return
        shares = pl_module.pull_shares.figures()
        for name, figures in self._convergence.figures(pl_module).items():
            multipliers = pl_module.multipliers[name][self._visited[name]]
            if trainer.is_global_zero:
                log_histogram(trainer, f"dual/{name}/multipliers", multipliers)
            values = quantiles(multipliers, QUANTILES).tolist()
            names = [f"q{100 * p:g}" for p in QUANTILES[:-1]] + ["max"]
            figures |= {f"multiplier_{n}": v for n, v in zip(names, values, strict=True)}
            figures["active"] = float((multipliers != 0).double().mean())
            figures |= shares.get(name, {})
            log_of_all_ranks(
                pl_module, {f"dual/{name}/{key}": value for key, value in figures.items()}
            )
        self._convergence = Convergence()

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self._convergence.sums, "visited": self._visited}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._convergence.sums = state_dict["sums"]
        self._visited = state_dict["visited"]


class Convergence:
    """How far from an optimum the dual steps of an epoch are; O(batch) a step.

    Of a constraint v ≤ u, u the relaxation u* of the formulation (0 where it has none), an optimum
    asks for v ≤ u and λ(v − u) = 0. With r = v − u* and the λ after the step, over the entries
    (sample and column) that stepped:

    ====================== ========================================================
    ``step``               mean ``|Δλ|``
    ``slackness``          mean ``|λr|``
    ``infeasibility_mean`` mean (r)₊, of an equality ``|r|``
    ``relaxed``            share with u* ≠ 0; only where the formulation relaxes
    ====================== ========================================================

    A constraint with one multiplier is met by a statistic of the batch, such as its mean, which
    varies from batch to batch; so r is averaged over the epoch's steps before it is measured.
    """

    def __init__(self) -> None:
        self.sums: dict[str, dict[str, Tensor]] = {}

    def add(self, module: PointwiseModule) -> None:
        """Adds the dual steps of the module's last training step, if it took any."""
        for name, step in module.dual_steps.items():
            known = self.sums.setdefault(name, {})
            for key, value in _sums_of(step, module._run.in_force(name)).items():
                last = key == "multiplier" or key not in known
                known[key] = value.double() if last else known[key] + value

    def figures(self, module: PointwiseModule) -> dict[str, dict[str, float]]:
        """The figures of the class docstring by constraint; none where nothing stepped."""
        found = {}
        for name, sums in self.sums.items():
            if "statistic" in sums:
                residual = sums["statistic"] / sums["steps"]
                figures = {
                    "step": sums["step"] / sums["entries"],
                    "slackness": (sums["multiplier"] * residual).abs().mean(),
                    "infeasibility_mean": _excess(residual, module.formulations[name]).mean(),
                }
            else:
                figures = {k: v / sums["entries"] for k, v in sums.items() if k != "entries"}
            found[name] = {key: float(value) for key, value in figures.items()}
        return found


def _excess(residual: Tensor, formulation: Formulation) -> Tensor:
    """By how much an inequality (r ≤ 0) or an equality (r = 0) is missed."""
    return residual.abs() if formulation.signed else residual.clamp(min=0)


def _sums_of(step: DualStep, formulation: Formulation) -> dict[str, Tensor]:
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
