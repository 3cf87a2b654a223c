"""Problems whose optimum or truth is known: see ``__main__.py``."""

from .problems import STEPS, Problem
from .run import PROBLEMS, Rows, Task

__all__ = ["PROBLEMS", "STEPS", "Problem", "Rows", "Task"]
