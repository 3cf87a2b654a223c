"""Fine-tuning language models under pointwise constraints, on PyTorch Lightning."""

from importlib.metadata import version

from .data import PointwiseDataModule
from .formulations import Average, CVaR, Formulation, Penalty, Pointwise, Relaxed, Tilted
from .loading import load
from .module import PointwiseModule
from .multipliers import Multipliers
from .optimizers import Optimization, Training
from .task import Constraint

__version__ = version("pl-pointwise")

__all__ = [
    "Average",
    "CVaR",
    "Constraint",
    "Formulation",
    "Multipliers",
    "Optimization",
    "Penalty",
    "Pointwise",
    "PointwiseDataModule",
    "PointwiseModule",
    "Relaxed",
    "Tilted",
    "Training",
    "load",
]
