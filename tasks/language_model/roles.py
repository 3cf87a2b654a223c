"""Responses by role, and what a constraint asks of those of one role.

A task has a table of requirements, a line for each constraint:

    requirements = {"refuse": Requirement("refusal", "at_least", kinds=("unsafe",)), …}

With s̄(y) the mean log-likelihood of a response's tokens, a constraint asks for s̄(y) ≥ ε or
s̄(y) ≤ ε of the responses of its role, or bounds another number of theirs (``value``). A response
may have a bound of its own, absolute or relative to the reference (records.py); a batch brings it
along as ``shift`` and ``relative``. "within" asks for a number in a band around the response's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pl_pointwise import Constraint
from pl_pointwise.task import Batch

from .likelihood.batch import ABSENT, collate_columns, collate_responses
from .likelihood.scoring import ResponseStatistics
from .text.records import Record


def mean_log_likelihood(outputs: ResponseStatistics) -> Tensor:
    """s̄ of each response, (B, R)."""
    return outputs.mean_log_likelihood


def log_ratio(outputs: ResponseStatistics) -> Tensor:
    """s̄(y₀) − s̄(y) of each response y, (B, R); response 0 is the chosen one."""
    means = outputs.mean_log_likelihood
    return means[:, :1] - means


def divergence(outputs: ResponseStatistics) -> Tensor:
    """KL(π ‖ π_ref) per token of each response, (B, R)."""
    return _none(outputs) if outputs.kl is None else outputs.kl


def drop(outputs: ResponseStatistics) -> Tensor:
    """s̄_ref − s̄ of each response, (B, R): how much less likely a token has become."""
    reference = outputs.reference_mean_log_likelihood
    return (
        _none(outputs) if reference is None else reference - outputs.mean_log_likelihood
    )


def lead(outputs: ResponseStatistics) -> Tensor:
    """The least over a response's tokens of log π(y_t) − max_{v ≠ y_t} log π(v), (B, R).

    Above 0 where greedy decoding writes the response.
    """
    assert outputs.lead is not None  # LanguageModelModule.forward asks for it.
    return outputs.lead


def _none(outputs: ResponseStatistics) -> Tensor:
    """Zeros that a gradient goes through, for a batch in which no role needs the reference."""
    return outputs.log_likelihood.where(torch.zeros_like(outputs.present), 0)


@dataclass(frozen=True)
class Requirement:
    """What a constraint asks of responses.

    Args:
        role: of the responses that it is about.
        bound: the side of the tolerance; "within" so much of the response's own number.
        several: whether a sample may have several such responses: values are (B, K), else (B,).
        kinds: of the prompts that it is about, as ``Record.kind`` names them; () is all.
        value: what is bounded of each scored response, (B, R).
    """

    role: str
    bound: Literal["at_least", "at_most", "within"]
    several: bool = False
    kinds: tuple[str, ...] = ()
    value: Callable[[ResponseStatistics], Tensor] = mean_log_likelihood

    def constraint(self, option: str, tolerance: float) -> Constraint:
        """The constraint of a tolerance that was given as ``option``; ValueError: of wrong sign."""
        # Nothing is within a band of no width, and no KL is below 0.
        if tolerance <= 0 and (self.bound == "within" or self.value is divergence):
            what = (
                "half the width of a band"
                if self.bound == "within"
                else "a KL per token"
            )
            raise ValueError(
                f"{option}={tolerance}: it is {what}. Give a number above 0."
            )
        if self.bound == "within":
            return Constraint(at_least=-tolerance, at_most=tolerance)
        # A forgotten minus sign: no model could reach the bound, and λ would grow without end.
        if tolerance > 0 and self.value is mean_log_likelihood:
            raise ValueError(
                f"{option}={tolerance}: it bounds a mean log-likelihood, which is never above 0. "
                "Give a negative number; or null, where the option takes it, for no such "
                "constraint."
            )
        if self.bound == "at_least":
            return Constraint(at_least=tolerance)
        return Constraint(at_most=tolerance)

    def columns(self, batch: Batch) -> Tensor:
        """Which responses of a batch it is about, (B,) or (B, K); −1 for none."""
        columns: Tensor = batch[self.role]
        # Safety asks for a refusal of unsafe prompts, and forbids the same text to benign ones.
        if self.kinds:
            concerned = torch.tensor(
                [record.kind in self.kinds for record in batch["records"]]
            )
            columns = columns.where(concerned[:, None], ABSENT)
        return columns if self.several else columns[:, 0]


def collate_rows(
    rows: Sequence[Mapping[str, Any]], roles: Sequence[str]
) -> dict[str, Any]:
    """The batch of B rows of data.py, R responses to each at most, K_r of role r::

        index, prompt_ids, prompt_lengths, response_ids, response_lengths   batch.py
        records   (B,)     objects
        roles     (B, R)    long   what each response is, a position in ``roles``; −1 where absent
        shift     (B, R)    float  what its own bound adds to s̄; NaN where the role's applies
        relative  (B, R)    bool   whether that bound is measured from the reference's s̄
        <role>    (B, K_r)  long   which responses are of the role; −1 where absent
        rank      (B,)      long   place among the samples of the same category

    R and K_r are the data set's, in every batch alike.
    """
    records: list[Record] = [row["record"] for row in rows]
    batch: Batch = collate_responses(
        [row["prompt"].tolist() for row in rows],
        [[*map(np.ndarray.tolist, row["responses"])] for row in rows],
        rows[0]["columns"],
    )
    for name in ("index", "rank"):
        batch[name] = torch.tensor([row[name] for row in rows])
    # An array: within a list Lightning's precisions such as bf16-true look for tensors, and die.
    batch["records"] = np.array(records, dtype=object)
    numbers = [[*map(roles.index, record.roles)] for record in records]
    batch["roles"] = collate_columns(numbers, rows[0]["columns"])
    for number, role in enumerate(roles):
        places = [_places_of(number, of_sample) for of_sample in numbers]
        batch[role] = collate_columns(places, max(1, rows[0]["widths"].get(role, 0)))
    batch["shift"] = torch.full(batch["roles"].shape, math.nan)
    batch["relative"] = torch.zeros(batch["roles"].shape, dtype=torch.bool)
    for row, record in enumerate(records):
        for column, response in enumerate(record.responses):
            bound = response.tolerance
            if bound is not None:
                # s̄ ≥ ε becomes s̄ − ε ≥ 0, and s̄ ≥ s̄_ref − δ becomes s̄ − s̄_ref + δ ≥ 0.
                batch["shift"][row, column] = bound if response.relative else -bound
                batch["relative"][row, column] = response.relative
    return batch


def _places_of(number: int, roles: Sequence[int]) -> list[int]:
    """Which of a sample's responses are of a role."""
    return [place for place, role in enumerate(roles) if role == number]


def mean_over(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of each sample over the columns of a mask, 0 of none: (B, R), (B, R) → (B,)."""
    return torch.where(mask, values, 0).sum(1) / mask.sum(1).clamp(min=1)
