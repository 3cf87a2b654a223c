"""Lightning callbacks around the method. They observe; none moves weights or multipliers."""

from pl_pointwise.callbacks.export import ModelExport
from pl_pointwise.callbacks.predictions import PredictionWriter

__all__ = ["ModelExport", "PredictionWriter"]
