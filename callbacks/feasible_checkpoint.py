"""Keeps the checkpoint that is best by the rule: feasible first, then the better objective."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from pl_pointwise.errors import TrainingError

RANK = "feasible_then_objective"


class FeasibleCheckpoint(ModelCheckpoint):
    """A ModelCheckpoint whose best is feasible if any checkpoint of the run is.

    A checkpoint is feasible if the largest ``val/{constraint}/{statistic}`` is at most ``at_most``.
    A feasible one comes before any other; of two feasible ones the better objective, of two others
    the smaller excess. ``best_model_score`` only orders: up to −0.5 is feasible, above 0 is not.

    Args:
        statistic: "cvar95", "max", "mean" or "violated" (the share, to be at most a fraction).
        at_most: its bound.
        constraints: names; None takes all.
        objective: the logged key that decides among the feasible.
        mode: whether a small or a large one is better.
        options: as in ModelCheckpoint, such as dirpath, filename, save_top_k, every_n_epochs.

    Raises:
        TrainingError: a key that no validation logged, when it is time to compare.

    >>> from lightning.pytorch import Trainer
    >>> from pl_pointwise.callbacks import FeasibleCheckpoint
    >>> callback = FeasibleCheckpoint(statistic="violated", at_most=0.05, save_top_k=3)
    >>> trainer = Trainer(accelerator="cpu", logger=False, callbacks=[callback])
    >>> trainer.checkpoint_callback is callback
    True
    """

    def __init__(
        self,
        statistic: str = "cvar95",
        at_most: float = 0.0,
        constraints: list[str] | None = None,
        objective: str = "val/objective",
        mode: Literal["min", "max"] = "min",
        **options: Any,
    ) -> None:
        super().__init__(monitor=RANK, mode="min", **options)
        self.statistic = statistic
        self.at_most = at_most
        self.constraints = constraints
        self.objective = objective
        self.larger_is_better = mode == "max"

    @property
    def state_key(self) -> str:
        """Of two of these callbacks each has a state of its own."""
        return self._generate_state_key(
            statistic=self.statistic,
            at_most=self.at_most,
            constraints=self.constraints,
            objective=self.objective,
            larger_is_better=self.larger_is_better,
        )

    def rank(self, trainer: Trainer) -> Tensor:
        """The order of the rule as one number, smaller is better."""
        module: Any = trainer.lightning_module
        names = self.constraints or list(module.constraints)
        keys = [f"val/{name}/{self.statistic}" for name in names]
        logged = trainer.callback_metrics
        missing = [key for key in [*keys, self.objective] if key not in logged]
        if missing:
            raise TrainingError(
                f"FeasibleCheckpoint compares {', '.join(missing)}, which is not logged. "
                f"Logged: {', '.join(sorted(logged))}. Give validation data, or name others."
            )
        # In the statistic's precision: 0.05 in float32 lies above 0.05.
        excess = max(
            (_nan_is_inf(logged[key] - self.at_most) for key in keys), default=0.0
        )
        if excess > 0:
            score = math.atan(excess) / math.pi  # in (0, ½]
        else:
            sign = -1 if self.larger_is_better else 1
            objective = _nan_is_inf(sign * logged[self.objective])
            score = math.atan(objective) / math.pi - 1  # in [−1½, −½]
        return torch.tensor(score, dtype=torch.float64)

    def _save_topk_checkpoint(
        self, trainer: Trainer, monitor_candidates: dict[str, Tensor]
    ) -> None:
        ranked = {**monitor_candidates, RANK: self.rank(trainer)}
        super()._save_topk_checkpoint(trainer, ranked)


def _nan_is_inf(value: Tensor) -> float:
    return math.inf if value.isnan() else float(value)
