"""The default optimizer's settings, as one group, and what schedulers need to be stepped by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal


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


def keeping_monitors(configure: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps a ``configure_optimizers`` so that its schedulers know what they monitor.

    Under manual optimization Lightning drops the keys ``monitor``, ``strict`` and
    ``reduce_on_plateau`` of a scheduler. Here they become attributes of the scheduler, as
    ``monitor`` is one of LightningCLI's ReduceLROnPlateau already.
    """

    @wraps(configure)
    def configured(module: Any) -> Any:
        result = configure(module)
        for part in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(part, Mapping):
                scheduler = part if "scheduler" in part else part.get("lr_scheduler")
                _annotate(scheduler, part.get("monitor"))
            elif isinstance(part, (list, tuple)):
                for entry in part:
                    _annotate(entry)
        return result

    return configured


def _annotate(entry: Any, monitor: str | None = None) -> None:
    """Moves the keys of a declared scheduler that Lightning would drop to the scheduler."""
    keys = {"monitor": monitor} if monitor is not None else {}
    if isinstance(entry, dict):
        dropped = [key for key in ("monitor", "strict", "reduce_on_plateau") if key in entry]
        keys |= {key: entry.pop(key) for key in dropped}
        entry = entry.get("scheduler")
    for key, value in keys.items():
        setattr(entry, key, value)
