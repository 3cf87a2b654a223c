"""HardNet's file of programs with a sine: azizanlab/hardnet, exp_opt.ipynb."""

from __future__ import annotations

from functools import partial

from .table import Judged, Table, sine


def columns(judged: Judged) -> dict[str, float]:
    """Means over instances of the objective and of an instance's largest violations."""
    return {
        "objective": float(judged.objective.mean()),
        "inequality, largest": float(judged.inequality.amax(1).mean()),
        "equality, largest": float(judged.equality.amax(1).mean()),
    }


def _row(objective: float, inequality: float, equality: float) -> dict[str, float]:
    return {
        "objective": objective,
        "inequality, largest": inequality,
        "equality, largest": equality,
    }


TABLE = Table(
    name="HardNet",
    # datasets/opt/make_dataset.py: seed 17.
    formula=partial(sine, 17),
    columns=columns,
    nonconvex=True,
    published={
        "IPOPT": _row(-14.28, 0, 0),
        "network without constraints": _row(-27.43, 12.05, 15.11),
        "soft penalty": _row(-13.13, 0, 0.35),
        "DC3": _row(-12.57, 0, 0),
        "HardNet": _row(-14.10, 0, 0),
    },
    file="hardnet, exp_opt.ipynb",
    shown=("objective", "inequality, largest", "equality, largest"),
    source="azizanlab/hardnet, exp_opt.ipynb: five seeds, 1,000 epochs; two digits are shown",
)
