"""A laboratory of small tasks of many fields: see ``__main__.py``."""

from __future__ import annotations

from collections.abc import Callable

from .control import control
from .equations import convection, heat
from .fairness import fairness
from .inventory import inventory
from .margins import margins
from .multitask import multitask
from .portfolio import portfolio
from .recall import recall
from .task import Task

ONE_PASS = (1,)

TASKS: dict[str, Callable[[], Task]] = {
    "portfolio": portfolio,
    "portfolio, one pass": lambda: portfolio(8000, ONE_PASS),
    "recall": recall,
    "recall, one pass": lambda: recall(8000, 800, 20, ONE_PASS),
    "inventory": inventory,
    "inventory, pieces": lambda: inventory(pieces=True),
    "fairness": fairness,
    "control": control,
    "control, one pass": lambda: control(2000, 10, ONE_PASS),
    "multitask": multitask,
    "margins": margins,
    "convection": lambda: convection(in_loss=False),
    "convection, in the loss": lambda: convection(in_loss=True),
    "heat": lambda: heat(in_loss=False),
    "heat, in the loss": lambda: heat(in_loss=True),
}
"""By name what makes each."""

__all__ = ["TASKS", "Task"]
