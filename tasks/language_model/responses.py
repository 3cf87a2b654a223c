"""Bounds on the likelihood of responses, by what each is: what the language tasks have in common.

With s̄(y) the mean log-likelihood of a response's tokens under the policy π,

    minimise   KL(π ‖ π_ref) a token, or −s̄, the mean over a sample's responses of the objective
    subject to s̄(y) ≥ ε, or s̄(y) ≤ ε, for every response y that a constraint is about

Which responses these are is the task's, and so are losses of its own. The reference π_ref is the
same model without its adapters.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchmetrics import Metric

from pl_pointwise import Constraint, Formulation, Training

from .module import LanguageModelModule
from .policy import Policy
from .scoring import ResponseStatistics


class ResponseModule(LanguageModelModule):
    """A causal language model whose responses are held to be likely or unlikely.

    Args:
        policy: the model.
        formulation: how the constraints are enforced; None for the objective alone.
        tolerances: ε by constraint; None for no such constraint.
        evaluation: what is measured, with a field NAME_tolerance for each constraint, None for ε.
        objective: "kl", "cross_entropy", or a loss of the task's own.
        training: how it is trained.

    Raises:
        ValueError: a positive tolerance, which no mean log-likelihood reaches or exceeds.
    """

    host_keys = (*LanguageModelModule.host_keys, "roles")
    upper_bounds: ClassVar[tuple[str, ...]]
    """The constraints whose ε is the largest value; that of the others is the least."""
    of_any_sign: ClassVar[tuple[str, ...]] = ()
    """The constraints on something else than a mean log-likelihood."""
    need_reference: ClassVar[tuple[str, ...]] = ("kl",)
    """The objectives that need the reference."""

    def __init__(
        self,
        policy: Policy,
        formulation: Formulation | dict[str, Formulation] | None,
        tolerances: Mapping[str, float | None],
        evaluation: Any,
        objective: str,
        training: Training,
    ) -> None:
        own = {name: value for name, value in tolerances.items() if value is not None}
        measured = {name: getattr(evaluation, f"{name}_tolerance") for name in own}
        super().__init__(
            formulation=formulation,
            constraints={
                name: self._bound(name, f"{name}_tolerance", value) for name, value in own.items()
            },
            evaluation_constraints={
                name: self._bound(name, f"evaluation.{name}_tolerance", value)
                for name, value in measured.items()
                if value is not None
            },
            training=training,
        )
        self.trained_on = objective
        self.evaluation = evaluation
        self.load_policy(policy)

    @classmethod
    def _bound(cls, name: str, option: str, tolerance: float) -> Constraint:
        """The constraint of a name."""
        upper = name in cls.upper_bounds
        if tolerance > 0 and name not in cls.of_any_sign:
            raise ValueError(
                f"{option}={tolerance}: it bounds a mean log-likelihood, which is never above 0, "
                + (
                    "so it would hold of every response. Give a negative number"
                    if upper
                    else f"so no response could reach it. Give −{tolerance:g}: the tokens then "
                    f"have a probability of e^−{tolerance:g} = {math.exp(-tolerance):.2f} each, in "
                    "the geometric mean"
                )
                + "; or null, where the option takes it, for no such constraint."
            )
        return Constraint(at_most=tolerance) if upper else Constraint(at_least=tolerance)

    # A task's own ---------------------------------------------------------------------------------

    @abstractmethod
    def of_objective(self, batch: Mapping[str, Any]) -> Tensor:
        """The responses that the objective is taken over, (B, R) bool."""

    @abstractmethod
    def constrained_responses(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """By constraint the responses it is about, (B,) or (B, K): their columns, −1 for none."""

    def referred(self, batch: Mapping[str, Any]) -> Tensor:
        """The responses that need the reference, (B, R) bool.

        In evaluation those of the objective do, as every method's KL is reported.
        """
        needed = not self.training or self.trained_on in self.need_reference
        return self.of_objective(batch) & needed

    def response_values(
        self, name: str, outputs: ResponseStatistics, batch: Mapping[str, Any]
    ) -> Tensor:
        """What a constraint bounds of each response, (B, R): s̄."""
        return outputs.mean_log_likelihood

    # The methods of a PointwiseModule -------------------------------------------------------------

    def forward(self, batch: dict[str, Any]) -> ResponseStatistics:
        """Statistics of every response, with the reference where it is needed."""
        return self.score(batch, self.referred(batch))

    def objective(self, outputs: ResponseStatistics, batch: dict[str, Any]) -> Tensor:
        """The mean over the objective's responses of the KL a token, or of −s̄; 0 of none, (B,)."""
        if self.trained_on == "cross_entropy":
            return self._over_objective(-outputs.mean_log_likelihood, batch)
        return self.divergence(outputs, batch)

    def constraint_values(
        self, outputs: ResponseStatistics, batch: dict[str, Any]
    ) -> dict[str, Tensor]:
        """By constraint the values of the responses it is about, (B,) or (B, K)."""
        responses, found = self.constrained_responses(batch), {}
        for name in self.constraints:
            values = self.response_values(name, outputs, batch)
            columns = responses[name].clamp(min=0).to(values.device, non_blocking=True)
            rows = columns.reshape(len(columns), -1)
            found[name] = values.gather(1, rows).view(columns.shape)
        return found

    def membership(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """A sample carries what it has responses for."""
        responses = self.constrained_responses(batch)
        terms = {name: responses[name] >= 0 for name in self.constraints}
        return {"objective": self.of_objective(batch).any(1), **terms}

    def divergence(self, outputs: ResponseStatistics, batch: Mapping[str, Any]) -> Tensor:
        """The mean over the objective's responses of the KL a token, 0 of none, (B,)."""
        kl = outputs.kl
        if kl is None:  # The batch has none. Zeros that a gradient goes through:
            kl = outputs.log_likelihood.where(torch.zeros_like(outputs.present), 0)
        return self._over_objective(kl, batch)

    def _over_objective(self, values: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """The mean over the objective's responses, (B, R) → (B,)."""
        carried = self.of_objective(batch).to(values.device, non_blocking=True)
        return mean_over(values, carried)

    def add_divergence(
        self, metric: Metric, outputs: ResponseStatistics, batch: Mapping[str, Any], real: Tensor
    ) -> None:
        """Adds the KL of the samples that carry the objective.

        real: bool (B,), False for samples that only fill the batch.
        """
        carries = self.of_objective(batch).any(1).to(real.device) & real
        if carries.any():
            metric.update(self.divergence(outputs, batch)[carries])

    @property
    def training_samples(self) -> Any:
        """The data set of this fit, as the data module made it."""
        return getattr(getattr(self.trainer.train_dataloader, "dataset", None), "rows", None)


def mean_over(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of each sample over the columns of a mask, 0 of none: (B, R), (B, R) → (B,)."""
    return torch.where(mask, values, 0).sum(1) / mask.sum(1).clamp(min=1)
