"""Optima by exact or iterative solvers, in float64; scipy alone is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog, minimize, nnls

Array = NDArray[np.float64]
Labels = NDArray[Any]
"""Bool, or whole numbers."""


def linear_program(
    cost: Array, matrix: Array, bound: Array, equal: Array, total: float
) -> Array:
    """The x ≥ 0 of least costᵀx with matrix·x ≤ bound and equalᵀx = total."""
    found = linprog(cost, matrix, bound, equal[None], np.array([total]), (0, None))
    if found.x is None:
        raise ValueError(f"no solution: {found.message}")
    return np.asarray(found.x)


def quadratic_program(
    quadratic: Array, linear: Array, matrix: Array, bound: Array
) -> Array:
    """The x of least ½xᵀQx + linearᵀx with matrix·x ≤ bound, Q positive definite.

    As a problem of least distance by non-negative least squares (Lawson and Hanson 1974, chapter
    23), which is exact after finitely many steps.
    """
    factor = np.linalg.cholesky(quadratic)
    centre = -np.linalg.solve(quadratic, linear)
    # Of z = Lᵀ(x − centre): turnedᵀz ≥ least.
    turned = -np.linalg.solve(factor, matrix.T)
    least = matrix @ centre - bound
    target = np.zeros(len(linear) + 1)
    target[-1] = 1.0
    stacked = np.vstack([turned, least])
    multipliers, _ = nnls(stacked, target, maxiter=50 * len(bound))
    rest = stacked @ multipliers - target
    if rest[-1] > -1e-12:
        raise ValueError("no x meets all bounds")
    return np.asarray(centre + np.linalg.solve(factor.T, -rest[:-1] / rest[-1]))


def smooth_program(
    cost: Callable[[Array], tuple[float, Array]],
    start: Array,
    values: Callable[[Array], Array],
    slopes: Callable[[Array], Array],
) -> Array:
    """The x of least cost with values(x) ≤ 0, all of them convex, by sequential programming.

    cost: and its gradient. slopes: the Jacobian of the values.
    """
    inside = {"type": "ineq", "fun": lambda x: -values(x), "jac": lambda x: -slopes(x)}
    options = {"maxiter": 1000, "ftol": 1e-12}
    found = minimize(
        cost, start, jac=True, method="SLSQP", constraints=[inside], options=options
    )
    if not found.success:
        raise ValueError(f"no solution: {found.message}")
    return np.asarray(found.x)


def stationarity(gradient: Array, slopes: Array) -> float:
    """How far a gradient is from −Σ λ∇v with λ ≥ 0, as a share of it: 0 at an optimum.

    slopes: ∇v of the constraints that are active. Of a convex problem this proves the optimum.
    """
    _, rest = nnls(slopes.T, -gradient, maxiter=100 * max(1, len(slopes)))
    return float(rest / np.linalg.norm(gradient))


def bisection(above: Callable[[Array], Array], low: Array, high: Array) -> Array:
    """Elementwise the place where ``above`` (True, then False) changes, between low and high."""
    for _ in range(100):
        middle = (low + high) / 2
        over = above(middle)
        low, high = np.where(over, middle, low), np.where(over, high, middle)
    return high
