"""A loop's state: the engine's, with what says whether it belongs to this loop."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from torch import Tensor

from ..errors import TrainingError, refuse_damaged
from .lagrangian import Lagrangian
from .loop_weights import LoopWeights

VERSION = 1
"""The version of what :meth:`~pl_pointwise.PointwiseLoss.state_dict` returns."""


def state_of_loop(
    lagrangian: Lagrangian,
    weights: LoopWeights,
    rows: int,
    units_before: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """λ and all that moves it, tensors and plain values.

    rows: samples of the largest step so far. units_before: those before the open step measured
        them, which a resume takes again; None where it measured none.
    """
    state = {
        "version": VERSION,
        "steps": lagrangian.steps,
        "rows": rows,
        "groups": _digest_of(lagrangian.groups),
        # To compare at a resume, as files of two steps may stand in one folder.
        "weights": weights.norm(),
        **lagrangian.state_dict(),
    }
    if units_before is not None:
        state["gradient_units"] = units_before
    return state


def load_state_of_loop(
    lagrangian: Lagrangian,
    weights: LoopWeights,
    state: Mapping[str, Any],
    steps: int | None,
) -> int:
    """Goes on from :func:`state_of_loop`, to the bit; returns its ``rows``.

    What is refused changes nothing. steps: of the weights, as the rest of the checkpoint counts
    them; None compares nothing.
    """
    with refuse_damaged(_damaged):
        _compare(lagrangian, state, steps)
        taken, rows = int(state["steps"]), int(state["rows"])
        with lagrangian.all_or_nothing():
            fingerprint = lagrangian.fingerprint
            lagrangian.load_state_dict(state)
            lagrangian.fingerprint = fingerprint or state["fingerprint"]
            lagrangian.fit_tables()
    lagrangian.steps = taken
    weights.saved_norm = state.get("weights")
    return rows


def _compare(
    lagrangian: Lagrangian, state: Mapping[str, Any], steps: int | None
) -> None:
    """Refuses a state that is not of this training set, before anything of it is loaded."""
    if state["version"] != VERSION:
        raise ValueError(f"version {state['version']}")
    owners, theirs = lagrangian.multipliers.samples, int(state["samples"])
    if theirs != owners:
        raise TrainingError(
            f"These multipliers belong to {theirs:,} samples, this PointwiseLoss has "
            f"{owners:,}: give it the training set of before."
        )
    # One that was not set says nothing; groups are compared in any case.
    fingerprints = {lagrangian.fingerprint, state["fingerprint"]} - {None}
    groups = _digest_of(lagrangian.groups)
    if len(fingerprints) > 1 or state.get("groups", groups) != groups:
        raise TrainingError(
            "These multipliers belong to another training set, order or groups: each would go "
            "on with another sample. Restore the data as they were, in their order, or start "
            "without this state."
        )
    if steps is not None and steps != int(state["steps"]):
        raise TrainingError(
            f"These multipliers are of step {int(state['steps']):,}, the weights of step "
            f"{steps:,}. Resume from a checkpoint that holds both."
        )


def _digest_of(groups: Tensor | None) -> str | None:
    return None if groups is None else sha256(groups.numpy().tobytes()).hexdigest()


def _damaged(error: Exception) -> TrainingError:
    return TrainingError(
        f"This is no state of a PointwiseLoss of version {VERSION}, or damaged: {error}."
    )
