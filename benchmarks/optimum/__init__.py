"""Every problem whose optimum, or whose truth, is known: what is paid, what is violated.

    python -m benchmarks.optimum --output results/optimum          (all: hours; needs cvxpy)
    python -m benchmarks.optimum --problem margins budget --epochs 10 30 --seeds 0
    python -m benchmarks.optimum --constants                        (half an hour)

``Pointwise()``, ``Relaxed(price=10)`` and hinges of a weight each decade, of .1 to 1,000. --units
states the constraints in other units: the problem stays the same, so the result should. --constants
runs ``Pointwise()`` with each constant of its rule at half and at double its value, and left out.
Writes optimum.csv and optimum.png, or constants.csv; goes on where it stopped.
"""

from .problems import PROBLEMS, STEPS, Problem
from .run import Rows, Task

__all__ = ["PROBLEMS", "STEPS", "Problem", "Rows", "Task"]
