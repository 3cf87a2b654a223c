"""What an export that is merged into half precision does to the answers that were constrained.

An adapter's change of a weight is often smaller than the rounding of that weight, so a merged model
is another one than was trained. How far is measured on some training samples, and said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from transformers import PreTrainedModel

from pl_pointwise.task import Batch

from .data import EncodedResponses
from .likelihood.scoring import ResponseScorer, inference
from .roles import collate_rows, divergence, lead

SAMPLES = 8  # The merged model is on the CPU, where a large one takes seconds for each.


def say_what_merging_changed(module: Any, merged: PreTrainedModel) -> None:
    """Says how far s̄ of constrained answers moves by the rounding, and which bounds are crossed.

    Of at most :data:`SAMPLES` training samples, spread over the set; nothing of a merged model in
    float32, nor where the training set is not at hand.
    """
    low = {weight.dtype for weight in merged.parameters() if weight.dtype.itemsize < 4}
    # In float32 merging rounds nothing that a bound could see.
    if not low:
        return
    kind = ", ".join(sorted(map(str, low)))
    batch = _constrained_samples(module)
    # An export of a loaded checkpoint has no trainer with data.
    if batch is None:
        rank_zero_info(
            f"The adapter is merged into weights of {kind} and rounded; what that changes was not "
            "measured, as no training set is at hand."
        )
        return
    before, after = _values(module, merged, batch)
    moved = after.mean_log_likelihood - before.mean_log_likelihood
    text = (
        f"The adapter is merged into weights of {kind} and rounded: on {len(batch['index'])} "
        f"training samples s̄ of an answer moves by up to {moved.abs().max():.2g}"
    )
    crossed = _newly_violated(module, before, after, batch)
    if not crossed:
        rank_zero_info(f"{text}, and no bound is crossed.")
        return
    counts = ", ".join(f"{name}: {count}" for name, count in crossed.items())
    rank_zero_warn(
        f"{text}, and bounds are crossed that were kept before ({counts}). Export the adapter "
        "alone (policy.merge_on_export: false), or train on a base in float32 (policy.dtype)."
    )


def _constrained_samples(module: Any) -> Batch | None:
    """A batch of training samples that carry a constraint; None of none, or without a data set."""
    trainer = getattr(module, "_trainer", None)
    rows = getattr(
        getattr(trainer and trainer.train_dataloader, "dataset", None), "rows", None
    )
    # Data of one's own are not of a form that can be sampled here.
    if not isinstance(rows, EncodedResponses):
        return None
    roles = {module.requirements[name].role for name in module.constraints}
    # Only answers with a bound can cross one.
    asked = [
        i for i, record in enumerate(rows.records) if roles.intersection(record.roles)
    ]
    some: Sequence[int] = asked[:: max(1, len(asked) // SAMPLES)][:SAMPLES]
    if not some:
        return None
    return collate_rows([rows[i] | {"index": i} for i in some], module.roles)


def _values(module: Any, merged: PreTrainedModel, batch: Batch) -> tuple[Any, Any]:
    """The statistics of the trained model, and these with the merged model's own likelihoods."""
    trained: nn.Module = module.model
    device = next(trained.parameters()).device

    def on(place: torch.device | str) -> Batch:
        return {
            k: v.to(place) if isinstance(v, Tensor) else v for k, v in batch.items()
        }

    with inference(trained):
        before = ResponseScorer(trained, "plain")(on(device), module.lora is not None)
    with inference(merged):
        of_merged = ResponseScorer(merged, "plain")(on("cpu"), reference=False)
    sums, means = (
        value.to(device)
        for value in (of_merged.log_likelihood, of_merged.mean_log_likelihood)
    )
    return before, replace(before, log_likelihood=sums, mean_log_likelihood=means)


def _newly_violated(
    module: Any, before: Any, after: Any, batch: Batch
) -> dict[str, int]:
    """By constraint on s̄ the values that only the rounding puts beyond their bound."""
    counts = {}
    membership = module.membership(batch)
    values, rounded = (
        module.constraint_values(statistics, batch) for statistics in (before, after)
    )
    bounds = module.constraints if module.training else module.evaluation_constraints
    for name, constraint in bounds.items():
        if module.requirements[name].value in (divergence, lead):
            continue
        mask = membership[name].to(values[name].device)
        kept = constraint.violation(values[name]) <= 0
        new = kept & (constraint.violation(rounded[name]) > 0) & mask.view(kept.shape)
        if new.any():
            counts[name] = int(new.sum())
    return counts
