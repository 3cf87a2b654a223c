"""The default optimizer's settings, as one group that every task passes through."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass
class Optimization:
    """AdamW with a warm-up and a schedule over the whole run.

    Args:
        learning_rate: the peak.
        weight_decay: AdamW's.
        schedule: "constant", "linear" (to zero) or "cosine" (to zero).
        warmup_ratio: share of all steps over which the rate rises from zero.
    """

    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_ratio: float = 0.0

    def factor(self, step: int, total_steps: int | None) -> float:
        """What the peak is multiplied by at a step; before ``total_steps`` is known, step 0's."""
        if total_steps is None:
            return 0.0 if self.warmup_ratio > 0 else 1.0
        warmup = math.ceil(self.warmup_ratio * total_steps)
        if step < warmup:
            return step / warmup
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        if self.schedule == "linear":
            return 1.0 - progress
        if self.schedule == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        return 1.0
