"""Fine-tuning language models under pointwise constraints, on PyTorch Lightning."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .constraint import Constraint
    from .data import PointwiseDataModule
    from .export.loading import load
    from .formulations import (
        Average,
        CVaR,
        Formulation,
        Penalty,
        Pointwise,
        Relaxed,
        Tilted,
    )
    from .loss import PointwiseLoss
    from .module import PointwiseModule
    from .multipliers import Multipliers
    from .optimizers import Optimization, Training

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
    "PointwiseLoss",
    "PointwiseModule",
    "Relaxed",
    "Tilted",
    "Training",
    "load",
]

_FILES = (
    "constraint",
    "formulations",
    "multipliers",
    "loss",
    "optimizers",
    "data",
    "module",
    "export.loading",
)
"""Where the names are, those first that need no Lightning."""


def __getattr__(name: str) -> Any:
    """Imports a public name when it is asked for: PointwiseLoss needs no Lightning."""
    for file in _FILES if name in __all__ else ():
        value = getattr(import_module(f".{file}", __name__), name, None)
        if value is not None:
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
