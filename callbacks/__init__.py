"""Lightning callbacks around the method. They observe; none moves weights or multipliers."""

from .export import ModelExport
from .predictions import PredictionWriter

__all__ = ["ModelExport", "PredictionWriter"]
