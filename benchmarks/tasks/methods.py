"""The methods by name, and the numbers of those that are trained without the package.

``Pointwise()``, ``Relaxed(price=10)``, ``Average()``: any formulation of the package, written as a
call of it with numbers. ``hinge 3``, ``squared 3``: one weight; ``hinge 3,0.03``: one of each
constraint; ``group hinge 3``: of the mean that a batch has of each group. ``cooper 0.1``: λv with
cooper's IndexedMultiplier, whose rate that is; ``cooper AL 0.1``: its augmented Lagrangian, whose
coefficient that is.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from itertools import product

from pl_pointwise import formulations
from pl_pointwise.formulations import Formulation

from .task import Task

RULES = ("Pointwise()", "Relaxed(price=10)", "Average()")
WEIGHTS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
RATES = tuple(10.0**power for power in range(-4, 5))
COOPER = ("cooper", "cooper AL")
STEPS_OF_A_GRID = (0.1, 1.0, 10.0)


@dataclass(frozen=True)
class Rival:
    """A fixed weight, or cooper's multiplier.

    Attributes:
        shape: "hinge", "squared", "cooper" or "cooper AL".
        numbers: a weight for each constraint, or one for all; of cooper its rate or coefficient.
        of_group: on the mean that a batch has of each group.
    """

    shape: str
    numbers: tuple[float, ...]
    of_group: bool = False


def names_for(task: Task) -> list[str]:
    """All methods of a task: grids where its units differ, means of groups where it has them."""
    found = list(RULES)
    shapes = ["hinge", "squared"]
    if task.groups is not None:
        shapes += ["group hinge", "group squared"]
    found += [f"{shape} {weight:g}" for shape in shapes for weight in WEIGHTS]
    for weights in cells(task):
        text = ",".join(f"{weight:g}" for weight in weights)
        found += [f"{shape} {text}" for shape in shapes[:2]]
    return found + [f"{shape} {rate:g}" for shape in COOPER for rate in RATES]


def cells(task: Task) -> list[tuple[float, ...]]:
    """A tenth, once and ten times the weight that each constraint's unit asks for."""
    if not task.grid:
        return []
    base = [task.grid[0][name] for name in task.constraints]
    steps = product(STEPS_OF_A_GRID, repeat=len(base))
    return [tuple(b * s for b, s in zip(base, of, strict=True)) for of in steps]


def method(name: str) -> Formulation | Rival:
    """What a name stands for.

    Raises:
        ValueError: a name of another form.

    >>> method("group hinge 3")
    Rival(shape='hinge', numbers=(3.0,), of_group=True)
    """
    if name.endswith(")"):
        return _formulation(name)
    shape, _, numbers = name.removeprefix("group ").rpartition(" ")
    if shape not in ("hinge", "squared", *COOPER):
        raise ValueError(
            f"{name!r}: no method; as Pointwise(), hinge 3, squared 3 or cooper 0.1."
        )
    found = tuple(float(number) for number in numbers.split(","))
    return Rival(shape, found, name.startswith("group "))


def _formulation(name: str) -> Formulation:
    """A formulation of the package from its call; only literals, so that no text is run."""
    call = ast.parse(name, mode="eval").body
    if (
        not isinstance(call, ast.Call)
        or not isinstance(call.func, ast.Name)
        or call.args
    ):
        raise ValueError(f"{name!r}: no call of a formulation with named numbers.")
    kind = getattr(formulations, call.func.id, None)
    if not (isinstance(kind, type) and issubclass(kind, Formulation)):
        raise ValueError(f"{name!r}: {call.func.id} is no formulation of the package.")
    arguments = {each.arg or "": ast.literal_eval(each.value) for each in call.keywords}
    return kind(**arguments)
