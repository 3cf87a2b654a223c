"""Ends training at an optimum: ``kkt/stationarity``, ``/feasibility``, ``/complementarity`` and
``/residual``, their largest, logged once an epoch.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from pl_pointwise.module import PointwiseModule
from pl_pointwise.step_log import log_of_all_ranks

from .convergence import Convergence

log = logging.getLogger(__name__)


class StopOnKKT(Callback):
    """Stops after ``patience`` epochs in a row with a KKT residual of at most ``tolerance``.

    The residual of an epoch of T steps is the largest of

    - stationarity, ‖(1/T) Σ_t g_t‖₂, with g_t the gradient of step t's Lagrangian before clipping:
      where training has settled, the noise of single batches averages out;
    - feasibility, the largest over constraints of mean (v − u*)₊;
    - complementarity, the largest over constraints of mean ``|λ(v − u*)|``,

    the last two of :class:`~pl_pointwise.callbacks.convergence.Convergence`. They are in the units
    of the objective's gradient, of the violations, and of the objective, and taken while the
    weights move: a learning rate that does not decay leaves a floor under them. Without constraints
    that have multipliers, stationarity stands alone.

    It keeps the sum of the gradients, one float32 copy of the trainable weights.

    Args:
        tolerance: above 0.
        patience: epochs in a row.
    """

    def __init__(self, tolerance: float, patience: int = 3) -> None:
        if not tolerance > 0 or patience < 1:
            raise ValueError(
                f"StopOnKKT(tolerance={tolerance}, patience={patience}): needs a tolerance above 0 "
                "and a patience of at least 1 epoch."
            )
        self.tolerance, self.patience = tolerance, patience
        self.met = 0
        """Epochs in a row, up to now, with a residual within the tolerance."""
        self._start_epoch()

    def _start_epoch(self) -> None:
        self._convergence = Convergence()
        self._gradient: dict[str, Tensor] = {}
        self._steps = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.met >= self.patience:
            trainer.should_stop = True  # Resumed where it had ended.

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0:  # Lightning leaves on_train_epoch_start out where a resume starts one.
            self._start_epoch()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        if not isinstance(pl_module, PointwiseModule) or pl_module.measured is None:
            return
        factor = _scale_of_gradients(trainer, optimizer)
        if pl_module.gradient_clip_val is not None:
            norm = pl_module.measured.gradient_norm
            factor *= min(1.0, pl_module.gradient_clip_val / (norm + 1e-6))  # As torch clips.
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad.detach()
                if isinstance(gradient, DTensor):
                    gradient = gradient.full_tensor()
                total = self._gradient.setdefault(name, torch.zeros_like(gradient).float())
                self._gradient[name] = total.to(gradient.device).add_(gradient, alpha=1 / factor)
        self._steps += 1

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if isinstance(pl_module, PointwiseModule):
            self._convergence.add(pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._steps:
            return
        by_constraint = self._convergence.figures().values()
        squares = sum(float(total.square().sum()) for total in self._gradient.values())
        parts = {
            "stationarity": squares**0.5 / self._steps,
            "feasibility": max((f["infeasibility_mean"] for f in by_constraint), default=0.0),
            "complementarity": max((f["slackness"] for f in by_constraint), default=0.0),
        }
        parts["residual"] = max(parts.values())
        log_of_all_ranks(pl_module, {f"kkt/{key}": value for key, value in parts.items()})
        # One answer for all ranks, whose gradients may differ in their last bit.
        within = trainer.strategy.broadcast(parts["residual"] <= self.tolerance)
        self.met = self.met + 1 if within else 0
        if self.met >= self.patience:
            trainer.should_stop = True
            if trainer.is_global_zero:
                log.info(
                    "KKT residual %.3g, within %.3g for %d epochs: stopping.",
                    parts["residual"],
                    self.tolerance,
                    self.met,
                )
        self._start_epoch()

    def state_dict(self) -> dict[str, Any]:
        return {
            "met": self.met,
            "sums": self._convergence.sums,
            "gradient": {name: total.cpu() for name, total in self._gradient.items()},
            "steps": self._steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.met, self._steps = state_dict["met"], state_dict["steps"]
        self._convergence.sums = state_dict["sums"]
        self._gradient = state_dict["gradient"]


def _scale_of_gradients(trainer: Trainer, optimizer: Optimizer) -> float:
    """What the gradients are multiplied by, under float16, when an optimizer's step begins.

    Lightning divides by it before, but where the optimizer does so itself, as fused ones do.
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None or not getattr(optimizer, "_step_supports_amp_scaling", False):
        return 1.0
    return float(scaler.get_scale())
