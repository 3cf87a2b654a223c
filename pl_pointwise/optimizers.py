"""How a module is trained: settings in groups, a schedule's length, what schedulers monitor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from numbers import Integral, Real
from typing import Any, Literal, get_args

from .errors import one_of

Schedule = Literal["constant", "linear", "cosine"]
Order = Literal["simultaneous", "dual_first"]


@dataclass
class Optimization:
    """AdamW with a warm-up and a schedule over the whole run.

    Args:
        learning_rate: the peak.
        weight_decay: AdamW's.
        schedule: "constant", "linear" (to zero) or "cosine" (to zero).
        warmup_ratio: share of all steps over which the rate rises from zero, from 0 to 1.

    Raises:
        ValueError: a number out of its range, an unknown schedule.

    >>> Optimization(learning_rate=1e-3, schedule="cosine", warmup_ratio=0.1).weight_decay
    0.0
    """

    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    schedule: Schedule = "constant"
    warmup_ratio: float = 0.0

    def __post_init__(self) -> None:
        _require("learning_rate", self.learning_rate, "at least 0", lambda x: x >= 0)
        _require("weight_decay", self.weight_decay, "at least 0", lambda x: x >= 0)
        share = "at least 0 and at most 1"
        _require("warmup_ratio", self.warmup_ratio, share, lambda x: 0 <= x <= 1)
        one_of("schedule", self.schedule, get_args(Schedule))


@dataclass
class Training:
    """How a module is trained, whatever its task.

    Args:
        optimization: the default optimizer and schedule.
        micro_batch_size: samples per forward and backward pass; None takes the whole batch. Gives
            the same step, in less memory.
        gradient_clip_val: largest norm of the gradient, or None.
        primal_steps: S, steps of the weights per dual step, which ends a window of S.
        order: "simultaneous": the step of the weights uses λ before this step's dual update;
            "dual_first": after it.

    Raises:
        ValueError: a number out of its range; "dual_first" with several ``primal_steps``.

    >>> Training(optimization=Optimization(learning_rate=1e-3), micro_batch_size=4).order
    'simultaneous'
    """

    optimization: Optimization = field(default_factory=Optimization)
    micro_batch_size: int | None = None
    gradient_clip_val: float | None = None
    primal_steps: int = 1
    order: Order = "simultaneous"

    def __post_init__(self) -> None:
        # From a checkpoint's hyperparameters.
        if isinstance(self.optimization, Mapping):
            self.optimization = Optimization(**self.optimization)
        if not isinstance(self.optimization, Optimization):
            raise ValueError(
                f"optimization={self.optimization!r}: give an Optimization(learning_rate=…), or "
                "override configure_optimizers."
            )
        for name in ("micro_batch_size", "primal_steps"):
            count = getattr(self, name)
            if count is not None or name == "primal_steps":
                _require(name, count, "whole, at least 1", lambda x: x >= 1, Integral)
        if self.gradient_clip_val is not None:
            wanted = "above 0. None sets no bound"
            _require(
                "gradient_clip_val", self.gradient_clip_val, wanted, lambda x: x > 0
            )
        one_of("order", self.order, get_args(Order))
        if self.primal_steps > 1 and self.order == "dual_first":
            raise ValueError(
                'order="dual_first" updates λ before every step of the weights: it has no meaning '
                "with primal_steps > 1."
            )


def _require(
    name: str, value: Any, wanted: str, fits: Callable[[float], bool], kind: Any = Real
) -> None:
    valid = (
        isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
    )
    if not (valid and fits(value)):
        raise ValueError(f"{name}={value!r}: must be a number, {wanted}.")


def keeping_monitors(configure: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps ``configure_optimizers``: schedulers keep the keys that Lightning drops."""

    @wraps(configure)
    def configured(module: Any) -> Any:
        result = configure(module)
        # Lightning takes one optimizer, a dict, a list of either, or two lists.
        for part in result if isinstance(result, (list, tuple)) else [result]:
            for entry in part if isinstance(part, (list, tuple)) else [part]:
                _keep_monitor(entry)
        return result

    return configured


def _keep_monitor(entry: Any) -> None:
    """Sets "monitor" and "strict" on the scheduler itself, in whichever form it is declared."""
    beside: dict[str, Any] = {}
    # Lightning takes them there, too.
    if isinstance(entry, dict) and "lr_scheduler" in entry:
        beside = entry
        entry = entry["lr_scheduler"]
    declared = entry if isinstance(entry, dict) else {}
    for key in ("monitor", "strict"):
        if key in declared or key in beside:
            value = declared.pop(key, beside.get(key))
            setattr(declared.get("scheduler", entry), key, value)
