"""SnareNet's convex QCQP with 50 inequalities: miniyachi/SnareNet, notebooks/opt_learning.ipynb."""

from __future__ import annotations

import numpy as np

from .table import SIZES, Arrays, Table, snarenet_columns

SEED = 2025  # datasets/cvx_qcqp/generate_dataset.py


def formula(instances: int = 10_000, sizes: tuple[int, int, int] = SIZES) -> Arrays:
    """½yᵀQy + pᵀy s.t. Ay = x, yᵀHₖy + Gₖy ≤ hₖ, so large an h that A⁺x is feasible."""
    variables, count, equations = sizes
    draw = np.random.RandomState(SEED)
    square = draw.random_sample(variables) * 0.5
    linear = draw.uniform(-1, 1, variables)
    equal = draw.uniform(-1, 1, (equations, variables))
    x = draw.uniform(-0.5, 0.5, (instances, equations))
    below = draw.uniform(-1, 1, (count, variables))
    curved = draw.uniform(0, 0.1, (count, variables))
    plus = np.linalg.pinv(equal)
    longest = np.linalg.norm(x, axis=1).max()
    quadratic = np.einsum("va,iv,vb->iab", plus, curved, plus)
    bound = np.linalg.norm(quadratic, ord=2, axis=(1, 2)) * longest**2
    bound += np.linalg.norm(below @ plus, axis=1) * longest + 0.1
    # In a file a constraint is ½yᵀHy.
    return {
        "Q": square,
        "p": linear,
        "A": equal,
        "G": below,
        "H": 2 * curved,
        "h": bound,
        "X": x,
    }


TABLE = Table(
    name="SnareNet, QCQP",
    formula=formula,
    columns=snarenet_columns,
    published={
        "DC3": {"gap, geometric mean": 15.9, "gap, largest": 33.7},
        "HProj": {"gap, geometric mean": 34.1, "gap, largest": 77.8},
        "SnareNet": {"gap, geometric mean": 0.0260, "gap, largest": 0.125},
    },
    file="SnareNet, opt_learning.ipynb",
    shown=("gap, geometric mean", "gap, largest"),
    source=(
        "miniyachi/SnareNet, notebooks/opt_learning.ipynb, cvx_qcqp, 50 inequalities: five seeds, "
        "1,000 or more epochs; of DC3 and HProj some instances are infeasible"
    ),
)
