"""The part of a module that is evaluated: one full pass over every data set, and what came of it.

Nothing is learned here. Which hooks it hangs on is in manual_optimization.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from .checkpoints import replayed_random_state
from .errors import TrainingError
from .evaluation import Evaluation, SampleValues, SampleViolations, stages_of
from .step import validate_strict
from .step_log import log_of_all_ranks

if TYPE_CHECKING:
    from .module import PointwiseModule


@contextmanager
def explained_gradients() -> Iterator[None]:
    """
    Raises:
        TrainingError: the block, which runs without gradients, asks autograd for one.
    """
    try:
        yield
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        raise TrainingError(
            f"A gradient is asked for in an evaluation, or in a pass that only measures ({error}). "
            "Put `with torch.enable_grad():` around what takes gradients of inputs, in forward() "
            "or constraint_values()."
        ) from error


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
        confidential: nobody is to see yet what this evaluation measures, so a task writes no files
            about it; set by ``compare --require``.
        certificate: what ``compare --require`` certified of this model, for its card.
        card_facts: what only the user knows, for its card; see model_card.py.
        weights_of: the checkpoint that its weights are of, for its card; "" for those of the last
            step.
        steps_of_checkpoint: after how many steps the one that was loaded was saved; for its card.
    """

    shared_objective: ClassVar[str] = "objective"
    confidential: bool = False
    certificate: str | None = None
    weights_of: str = ""
    steps_of_checkpoint: int = 0
    card_facts: Mapping[str, Any] = MappingProxyType({})

    def __init__(self) -> None:
        super().__init__()
        self._evaluations: dict[str, Evaluation] = {}
        self._forget_evaluations()

    def strict_values(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        """ℓ_k as the requirement means it, where ``constraint_values`` is a surrogate of it.

        For what has no gradient, such as a test that a generated answer passes or not: given for
        all constraints or some, in the shapes of ``constraint_values`` and against the same bound.
        With v the strict violation and ṽ the surrogate's,

        - the weights follow ṽ: the gradient of ψ(ṽ, λ), and the unit of the multipliers;
        - the multipliers follow v: λ ← (λ + η ∂ψ/∂λ(v, λ))₊, of a statistic of the batch that of v;
          so does all that is reported, in training, ``validate`` and ``test``.

        That is the proxy Lagrangian of Cotter et al. (2019). Slack and relaxation belong to the
        requirement, so the dual step finds both anew at v: of
        :class:`~pl_pointwise.formulations.Relaxed` u*(v, λ) is what is reported, λ comes to rest at
        c′(v), and at the linear cost it stays within β. The weights have a u*(ṽ, λ) of their own.
        With a standard Lagrangian (α None) the weights are pushed by λ alone, so by nothing else
        than the strict test; with α also towards ṽ ≤ 0. A :class:`~pl_pointwise.formulations.CVaR`
        is refused: its threshold is a quantile of ṽ, and v has another.

        What is left out is its own strict value: a constraint, in this batch or always. Where a
        test costs too much for every visit of a sample, give its last strict value again, or the
        surrogate. Called without gradients, behind ``constraint_values``; what it draws changes
        nothing, and modes and buffers it must leave as they are.
        """
        return {}

    @property
    def judges_strictly(self) -> bool:
        """Whether :meth:`strict_values` is asked; the same for all steps of a fit."""
        return type(self).strict_values is not Evaluated.strict_values

    def judged_values(
        self, outputs: Any, batch: Any, values: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """By constraint what multipliers and reports go by: strict values, else ``values``.

        Raises:
            ValueError, DataError: strict values of another name or shape; of a CVaR.
        """
        if not self.judges_strictly:
            return values
        with torch.no_grad(), replayed_random_state(self.device):
            strict = validate_strict(self.strict_values(outputs, batch), values)
        for name in strict:
            if getattr(self._module.formulations.get(name), "anchor", None) == "threshold":
                raise ValueError(
                    f'strict_values()["{name}"]: the threshold of a CVaR is a quantile of what the '
                    "weights follow, and strict values have another. Take Average, Tilted or "
                    "Pointwise, or leave it out."
                )
        return {name: strict.get(name, value.detach()) for name, value in values.items()}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        stage = stages_of("val", self.trainer.val_dataloaders)[dataloader_idx]
        with explained_gradients():
            self._evaluations[stage].add(self._module, batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        stage = stages_of("test", self.trainer.test_dataloaders)[dataloader_idx]
        with explained_gradients():
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
