"""NLPOpt-Net's QP: SOULS-TAMU/NLPOpt-Net-Experiments, Notebook_Table_01/Inference_comparison.ipynb.

minimise ½yᵀQy + cᵀy  subject to  Ay = b + Bx,  Cy ≤ d,  l + Lx ≤ y ≤ u + Ux

Its bounds move with x. In a file of one's own problems they do not, so that x is a part of the
variables here: (y, s) with s = x, and of the equalities' right side (x, b).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from scipy import sparse

from .table import Arrays, Judged, Table

SEED, PARAMETERS, VARIABLES, COUNT = 0, 50, 100, 50
TRAINED = JUDGED = 1000


@lru_cache
def theirs() -> Arrays:
    """Their numbers, in their order of draws."""
    draw = np.random.default_rng(SEED)
    n = VARIABLES
    mixing = draw.standard_normal((n, n))
    square = mixing.T @ mixing / n + np.diag(draw.uniform(1.2, 1.8, n))
    linear = draw.uniform(0.5, 1.5, n)
    equal = _equations(draw)
    center = draw.uniform(-0.5, 0.5, n)
    moves = draw.uniform(-0.2, 0.2, (n, PARAMETERS))
    below = np.zeros((COUNT, n))
    for row in below:
        chosen = draw.choice(n, size=6, replace=False)
        values = draw.standard_normal(6)
        row[chosen] = values / np.linalg.norm(values)
    room = 1.05 * np.abs(moves).sum(1).max()
    x = 2 * draw.uniform(size=(TRAINED + JUDGED, PARAMETERS)) - 1
    return {
        "Q": square,
        "c": linear,
        "A": equal,
        "b": equal @ center,
        "T": moves,
        "C": below,
        "d": below @ center + np.abs(below @ moves).sum(1),
        "l": center - room,
        "u": center + room,
        "x": x,
    }


def _equations(draw: np.random.Generator) -> np.ndarray:
    """Sparse rows of norm 1, each then scaled."""
    found = sparse.random(
        COUNT,
        VARIABLES,
        density=0.1,
        format="csr",
        random_state=draw,
        data_rvs=lambda k: draw.normal(0.0, 1.0, size=k),
    ).toarray()
    for row in found:
        if not row.any():
            row[draw.integers(0, VARIABLES)] = draw.normal()
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    found += 1e-4 * np.eye(COUNT, VARIABLES)
    return draw.uniform(0.8, 1.2, size=COUNT)[:, None] * found


def rows(x: np.ndarray) -> np.ndarray:
    """The right sides (x, b) of instances x."""
    of = theirs()
    return np.hstack([x, np.broadcast_to(of["b"], (len(x), COUNT))])


def formula() -> Arrays:
    """In the variables (y, s): 1,000 instances train; of the file's own 200 more none is read."""
    of = theirs()
    n, p = VARIABLES, PARAMETERS
    moves, whole = of["T"], np.eye(n)
    nothing = np.zeros
    return {
        "Q": np.block([[of["Q"], nothing((n, p))], [nothing((p, n + p))]]),
        "p": np.concatenate([of["c"], nothing(p)]),
        "A": np.block([[nothing((p, n)), np.eye(p)], [of["A"], -of["A"] @ moves]]),
        "G": np.block(
            [[of["C"], nothing((COUNT, p))], [whole, -moves], [-whole, moves]]
        ),
        "h": np.concatenate([of["d"], of["u"], -of["l"]]),
        "X": rows(of["x"][: TRAINED + 200]),
    }


def columns(judged: Judged) -> dict[str, float]:
    """As their notebook has it: a share of the answer's own objective, signed, a mean."""
    gap = (judged.objective - judged.best) / judged.objective.abs()
    trained, unseen = gap.split((TRAINED, JUDGED))
    worst = torch.cat([judged.inequality, judged.equality], 1)
    return {
        "objective": float(judged.objective.mean()),
        "gap, %": 100 * float(gap.mean()),
        "gap, %, trained": 100 * float(trained.mean()),
        "gap, %, unseen": 100 * float(unseen.mean()),
        "violation, largest": float(worst.max()),
    }


TABLE = Table(
    name="NLPOpt-Net, QP",
    formula=formula,
    columns=columns,
    published={
        "OSQP": {"objective": 6.601612},
        "NLPOpt-Net": {
            "objective": 6.602924,
            "gap, %": 0.081119,
            "violation, largest": 7.5e-11,
        },
    },
    file="NLPOpt-Net-Experiments, Inference_comparison.ipynb",
    shown=("objective", "gap, %", "violation, largest"),
    source=(
        "SOULS-TAMU/NLPOpt-Net-Experiments, Notebook_Table_01/Inference_comparison.ipynb: one run, "
        "1,000 epochs; judged are the 1,000 instances that train and 1,000 more"
    ),
    epochs=1000,
    batch=40,
    judged=lambda: rows(theirs()["x"]),
)
