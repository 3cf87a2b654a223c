"""A proof with every answer: how far from the optimum it can be at most.

For any λ ≥ 0 the least Lagrangian bounds the optimum of a convex problem from below,

    D(λ; x) = min over y with Ay = b of  f(y) + λᵀg(y)  ≤  min f(y) subject to Ay = b, g(y) ≤ 0,

so that f(y) − D is more than a feasible y is above the optimum. A network λ(x), trained by D alone,
finds a good λ for every x, without solver or labels; Newton steps on D improve it for one x.

Signs: g ≤ 0 is satisfied. Bounds are computed in float64, whatever the dtype of the module and of
x, and lowered by what rounding and an inexact minimum can amount to.
"""

from .certified import Certified, Solution, gap_of
from .convex import ConvexProgram
from .network import DualNetwork, train_bound
from .problems import ConvexProblems
from .quadratic import QuadraticProgram
from .stationary import LocalSolution, Stationary, stationarity

__all__ = [
    "Certified",
    "ConvexProblems",
    "ConvexProgram",
    "DualNetwork",
    "LocalSolution",
    "QuadraticProgram",
    "Solution",
    "Stationary",
    "gap_of",
    "stationarity",
    "train_bound",
]
