"""Fine-tuning language models under pointwise constraints, on PyTorch Lightning."""

from .data import PointwiseDataModule
from .formulations import (
    Average,
    Constraint,
    Formulation,
    Penalty,
    Pointwise,
    Relaxed,
)
from .module import PointwiseModule
from .multipliers import Multipliers
from .optimization import Optimization

__all__ = [
    "Average",
    "Constraint",
    "Formulation",
    "Multipliers",
    "Optimization",
    "Penalty",
    "Pointwise",
    "PointwiseDataModule",
    "PointwiseModule",
    "Relaxed",
]
