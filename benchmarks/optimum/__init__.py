"""Problems whose optimum or truth is known: see ``__main__.py``."""

from .problems import PROBLEMS, STEPS, Problem
from .run import Rows, Task

__all__ = ["PROBLEMS", "STEPS", "Problem", "Rows", "Task"]
