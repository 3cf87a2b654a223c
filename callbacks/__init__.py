"""Lightning callbacks around the method. They observe; none moves weights or multipliers."""

from .answer_samples import AnswerSamples
from .dual_monitor import DualMonitor
from .export import ModelExport
from .feasible_checkpoint import FeasibleCheckpoint
from .hardest_samples import HardestSamples
from .predictions import PredictionWriter
from .stop_on_kkt import StopOnKKT
from .termination import SaveOnTermination
from .violation_curves import ViolationCurves

__all__ = [
    "AnswerSamples",
    "DualMonitor",
    "FeasibleCheckpoint",
    "HardestSamples",
    "ModelExport",
    "PredictionWriter",
    "SaveOnTermination",
    "StopOnKKT",
    "ViolationCurves",
]
