"""A laboratory of small tasks of many fields: see ``__main__.py``."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.optimum import problems

from .balance import balance
from .completion import completion
from .control import control
from .denoise import denoise
from .energy import energy
from .equations import convection, heat
from .fairness import fairness
from .inventory import inventory
from .known import known
from .lipschitz import lipschitz
from .margins import margins
from .monotone import monotone
from .multitask import multitask
from .outliers import outliers
from .portfolio import portfolio
from .quantiles import quantiles
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
    "quantiles": quantiles,
    "monotone": monotone,
    "lipschitz": lipschitz,
    "outliers": outliers,
    "energy": energy,
    "balance": balance,
    "completion": completion,
    "denoise": denoise,
    "multitask": multitask,
    "margins": margins,
    "convection": lambda: convection(in_loss=False),
    "convection, in the loss": lambda: convection(in_loss=True),
    "heat": lambda: heat(in_loss=False),
    "heat, in the loss": lambda: heat(in_loss=True),
    "digits: margins": lambda: known(problems.margins, 13.7832),
    "digits: retention": lambda: known(problems.retention, 0.642246),
    "digits: unlike units": lambda: known(problems.unlike_units, 19.0498),
    "digits: softmax with a cap": lambda: known(problems.capped, 0.597015),
    "digits: equalities": lambda: known(problems.equalities, 144.19),
    "digits: budget": lambda: known(lambda: problems.retaught(learn=True)),
    "digits: from zero": lambda: known(lambda: problems.retaught(learn=False)),
    "band": lambda: known(lambda: problems.band(2000, (1, 10))),
}
"""By name what makes each."""

__all__ = ["TASKS", "Task"]
