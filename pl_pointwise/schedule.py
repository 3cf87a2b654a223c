"""A schedule that leaves parameter groups alone that came later."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LambdaLR


class FirstGroupsLambdaLR(LambdaLR):
    """LambdaLR of the groups that the optimizer had at first.

    One that a callback adds, such as BackboneFinetuning, keeps the rate that the callback gives it;
    LambdaLR itself fails at it.
    """

    def get_lr(self) -> list[Any]:
        groups = self.optimizer.param_groups
        later = groups[len(self.base_lrs) :]
        self.optimizer.param_groups = groups[: len(self.base_lrs)]
        try:
            return [*super().get_lr(), *(group["lr"] for group in later)]
        finally:
            self.optimizer.param_groups = groups
