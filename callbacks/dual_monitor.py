"""Logs the multipliers and how far from an optimum they are: ``dual/{constraint}/{statistic}``.

``multiplier_q50`` ``_q90`` ``_q99`` ``_max``, ``active`` (share of λ ≠ 0), and over the dual steps
of the epoch ``step``, ``slackness``, ``infeasibility_mean``, ``infeasibility_max``, ``relaxed``,
see :class:`~pl_pointwise.callbacks.convergence.Convergence`; and ``share`` and ``overshoot``, of
the pull, see :mod:`~pl_pointwise.multiplier_share`: not in an epoch in which nothing was pulled.
TensorBoard, W&B and MLflow get ``multipliers`` too, the histogram of λ.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from pl_pointwise.metrics import quantiles
from pl_pointwise.module import PointwiseModule
from pl_pointwise.step_log import log_of_all_ranks

from .convergence import Convergence
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
        for name, figures in self._convergence.figures().items():
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
