"""The part of a module that is evaluated: one full pass over every data set, and what came of it.

Nothing is learned here. Which hooks it hangs on is in manual_optimization.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

from lightning.pytorch import LightningModule
from torch import Tensor

from .evaluation import Evaluation, SampleValues, SampleViolations, stages_of
from .step_log import log_of_all_ranks

if TYPE_CHECKING:
    from .module import PointwiseModule


class Evaluated(LightningModule):
    """``validate`` and ``test``, sample by sample.

    Attributes:
        violations: after ``validate`` and ``test``, by stage and constraint, all values of that
            pass, 1-D on the CPU.
        evaluated: the same, sample by sample.
        evaluated_metrics: likewise by stage and name the task's metrics that are means over samples
            (:class:`~pl_pointwise.evaluation.MeanBySample`), sample by sample.
        shared_objective: the metric that says the objective of every method of the task; by default
            each method's own.
        certificate: what ``compare --require`` certified of this model, for its card.
        weights_of: the checkpoint that its weights are of, for its card; "" for those of the last
            step.
    """

    shared_objective: ClassVar[str] = "objective"
    certificate: str | None = None
    weights_of: str = ""

    def __init__(self) -> None:
        super().__init__()
        self._evaluations: dict[str, Evaluation] = {}
        self._forget_evaluations()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        stage = stages_of("val", self.trainer.val_dataloaders)[dataloader_idx]
        self._evaluations[stage].add(self._module, batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        stage = stages_of("test", self.trainer.test_dataloaders)[dataloader_idx]
        self._evaluations[stage].add(self._module, batch)

    @property
    def _module(self) -> PointwiseModule:
        return cast("PointwiseModule", self)

    def _forget_evaluations(self) -> None:
        """Results of other weights, or of a sanity check's batches."""
        self.violations: dict[str, dict[str, Tensor]] = {}
        self.evaluated: dict[str, dict[str, SampleViolations]] = {}
        self.evaluated_metrics: dict[str, dict[str, SampleValues]] = {}

    def _start_evaluations(self) -> None:
        """On every rank, whether or not it gets a batch: what follows at the end is collective."""
        testing = self.trainer.testing
        loaders = self.trainer.test_dataloaders if testing else self.trainer.val_dataloaders
        self._evaluations = {
            stage: Evaluation(stage, self._module)
            for stage in stages_of("test" if testing else "val", loaders)
        }

    def _log_evaluations(self) -> None:
        self._module.finish_evaluation_metrics({s: e.task for s, e in self._evaluations.items()})
        for stage, evaluation in self._evaluations.items():
            shown, self.evaluated[stage], self.evaluated_metrics[stage] = evaluation.results()
            self.violations[stage] = {n: v.pooled() for n, v in self.evaluated[stage].items()}
            log_of_all_ranks(self, shown, add_dataloader_idx=False)
        self._evaluations = {}
