"""Lightning callbacks around the method. They observe; none moves weights or multipliers."""

from typing import TYPE_CHECKING

from pl_pointwise.extras import imported_on_use

if TYPE_CHECKING:
    from .answer_samples import AnswerSamples as AnswerSamples
    from .dual_monitor import DualMonitor as DualMonitor
    from .export import ModelExport as ModelExport
    from .feasible_checkpoint import FeasibleCheckpoint as FeasibleCheckpoint
    from .hardest_samples import HardestSamples as HardestSamples
    from .predictions import PredictionWriter as PredictionWriter
    from .run_progress_bar import RunProgressBar as RunProgressBar
    from .termination import SaveOnTermination as SaveOnTermination

_MODULES = {
    "AnswerSamples": "answer_samples",
    "DualMonitor": "dual_monitor",
    "FeasibleCheckpoint": "feasible_checkpoint",
    "HardestSamples": "hardest_samples",
    "ModelExport": "export",
    "PredictionWriter": "predictions",
    "RunProgressBar": "run_progress_bar",
    "SaveOnTermination": "termination",
}
__all__ = list(_MODULES)
__getattr__ = imported_on_use(__name__, _MODULES)
