"""SnareNet's non-convex programs: miniyachi/SnareNet, notebooks/opt_learning.ipynb."""

from __future__ import annotations

from functools import partial

from .table import Table, sine, snarenet_columns

TABLE = Table(
    name="SnareNet, non-convex",
    # datasets/noncvx/generate_dataset.py: seed 2025.
    formula=partial(sine, 2025),
    columns=snarenet_columns,
    nonconvex=True,
    published={
        "DC3": {"gap, geometric mean": 2.68, "gap, largest": 8.81},
        "HardNet": {"gap, geometric mean": 0.917, "gap, largest": 10.2},
        "HProj": {"gap, geometric mean": 3.72, "gap, largest": 597},
        "SnareNet": {"gap, geometric mean": 0.0790, "gap, largest": 0.428},
    },
    file="SnareNet, opt_learning.ipynb",
    shown=("gap, geometric mean", "gap, largest"),
    source=(
        "miniyachi/SnareNet, notebooks/opt_learning.ipynb, noncvx: five seeds, 2,000 epochs; "
        "SnareNet's row is that of a tolerance of 1e-8"
    ),
)
