"""What tasks of preference pairs share: their losses, the order of the answers, and grouping.

A prompt has a chosen answer, of role "prefer", and one or several rejected ones, of role "avoid".
"""

from __future__ import annotations

from torch import Tensor
from torchmetrics import MeanMetric

from pl_pointwise.task import Batch, Metrics

from .data import ResponseDataModule
from .likelihood.preference_losses import (
    NEED_REFERENCE,
    Objective,
    PreferenceLosses,
    pairs_of,
    preference_loss,
)
from .likelihood.scoring import ResponseStatistics
from .module import LanguageModelModule
from .roles import log_ratio
from .text.pairs import ROLES, grouped
from .text.records import Record


class PairsModule(LanguageModelModule):
    """A language model trained on pairs; a subclass sets ``losses`` and its requirements.

    Attributes:
        losses: hyper-parameters of the preference losses.
    """

    roles = ROLES
    objective_roles = ROLES
    need_reference = NEED_REFERENCE
    trained_on: Objective
    losses: PreferenceLosses

    def own_loss(self, outputs: ResponseStatistics, batch: Batch) -> Tensor:
        """The preference loss of each sample, (B,)."""
        return preference_loss(self.trained_on, outputs, self.losses)

    def evaluation_metrics(self) -> Metrics:
        """Those of all language tasks, and how often the chosen answer is the likelier one."""
        return {**super().evaluation_metrics(), "pairwise_accuracy": MeanMetric()}

    def update_evaluation_metrics(
        self,
        metrics: Metrics,
        outputs: ResponseStatistics,
        batch: Batch,
        real: Tensor,
        stage: str,
    ) -> None:
        """Adds a batch; real: bool (B,), False for samples that only fill it."""
        super().update_evaluation_metrics(metrics, outputs, batch, real, stage)
        chosen_is_likelier = log_ratio(outputs)[:, 1:] > 0
        right = chosen_is_likelier[self.real_pairs(outputs, real)]
        metrics["pairwise_accuracy"].update(right.float())

    def real_pairs(self, outputs: ResponseStatistics, real: Tensor) -> Tensor:
        """The pairs of a batch that count in an evaluation, (B, R − 1) bool."""
        return pairs_of(outputs) & real[:, None]


class PairsDataModule(ResponseDataModule):
    """Pairs from files or the hub; a subclass sets ``group_rejected``.

    Attributes:
        group_rejected: whether the records of one prompt and chosen answer are one sample.
    """

    roles = ROLES
    group_rejected: bool

    def read_splits(self) -> dict[str, list[Record]]:
        """The splits, of several rejected answers one sample where asked for."""
        splits = super().read_splits()
        if not self.group_rejected:
            return splits
        # Within a split: no prompt stands in two of them.
        return {name: grouped(records) for name, records in splits.items()}
