"""λ in the checkpoints of a ``Trainer``: of the same saving as the other files, or refused."""

from __future__ import annotations

import json
import os
import re
import secrets
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import TRAINER_STATE_NAME

from .errors import TrainingError

FILE = "pointwise.pt"
"""Of the multipliers, in the folder of a checkpoint."""
MARK = "pl_pointwise"
"""The entry of the multipliers and of ``trainer_state.json`` that says they were saved together."""


def new_mark() -> dict[str, Any]:
    """In the form of a callback's state, which a trainer keeps in its own."""
    return {"args": {}, "attributes": {"saving": secrets.token_hex(8)}}


def write_multipliers(state: dict[str, Any], folder: Path) -> None:
    """Writes whole, or leaves nothing of its name."""
    part = folder / f"{FILE}.part"
    try:
        with part.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, folder / FILE)
    except (OSError, RuntimeError) as error:  # torch.save wraps those of the file.
        part.unlink(missing_ok=True)
        raise TrainingError(
            f"The multipliers could not be written to {folder / FILE}: {error}. Earlier "
            "checkpoints are whole."
        ) from error


def load_multipliers(folder: Path) -> dict[str, Any]:
    """The state of the multipliers in a checkpoint; refused if it is of another saving."""
    path = folder / FILE
    if not path.is_file():
        raise TrainingError(
            f"{path} is missing: this checkpoint has no multipliers, or was not written to its "
            "end. Resume from another one; train(resume_from_checkpoint=True) finds the last."
        )
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except Exception as error:  # What reading a damaged pickle raises has no base.
        raise TrainingError(f"{path} is damaged; nothing of it was run.") from error
    mark = state.get(MARK) if isinstance(state, dict) else None
    if mark is not None and mark != _mark_of_trainer(folder):
        raise TrainingError(
            f"{folder} holds files of two savings: its multipliers and its {TRAINER_STATE_NAME} "
            "were not written together. Resume from another checkpoint."
        )
    return state


def _mark_of_trainer(folder: Path) -> Any:
    try:
        state = json.loads((folder / TRAINER_STATE_NAME).read_text())
        return state["stateful_callbacks"][MARK]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def last_whole_checkpoint(folder: str | Path) -> str | None:
    """The last checkpoint in a folder that was written to its end; None where there is none.

    Raises:
        TrainingError: there are checkpoints, and none is whole.
    """
    path = Path(folder)
    numbered = []
    for checkpoint in path.iterdir() if path.is_dir() else ():
        number = re.fullmatch(r"checkpoint-(\d+)", checkpoint.name)
        if number and checkpoint.is_dir():
            numbered.append((int(number[1]), checkpoint))
    for _, checkpoint in sorted(numbered, reverse=True):
        try:
            load_multipliers(checkpoint)
        except TrainingError:
            continue
        # It is written after the multipliers: without it the saving was broken off.
        if (checkpoint / TRAINER_STATE_NAME).is_file():
            return str(checkpoint)
    if numbered:
        raise TrainingError(
            f"No checkpoint in {path} has multipliers and was written to its end: they have no "
            "multipliers, or are damaged. Start without resume_from_checkpoint."
        )
    return None
