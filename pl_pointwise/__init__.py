"""Fine-tuning language models under pointwise constraints, on PyTorch Lightning."""

from pl_pointwise.data import PointwiseDataModule
from pl_pointwise.formulations import (
    Average,
    Constraint,
    Formulation,
    Penalty,
    Pointwise,
    Relaxed,
)
from pl_pointwise.module import PointwiseModule
from pl_pointwise.multipliers import Multipliers
from pl_pointwise.optimization import Optimization

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
