"""Answers that an evaluation asks for: of which data sets, how they count, and where they go."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torchmetrics import Metric


def answered_sets(trainer: Trainer, wanted: Sequence[str]) -> list[str]:
    """The data sets of this pass whose prompts are answered: none of a validation in a fit.

    wanted: of ``test``; ``validate`` answers "val" where "test" is among them.
    """
    if trainer.state.fn == TrainerFn.VALIDATING:
        return ["val"] if "test" in wanted else []
    return list(wanted) if trainer.testing else []


def add_answers(
    metric: Metric, answers: Sequence[Mapping[str, Any]], values: Sequence[bool]
) -> None:
    """Adds what holds of each answer, by its "index", to a mean over samples."""
    index = torch.tensor([answer["index"] for answer in answers], device=metric.device).long()
    metric.update(index, torch.tensor(values, device=metric.device).float())


def write_answers(
    trainer: Trainer, stage: str, answers: Sequence[dict[str, Any]], longest: int
) -> list[dict[str, Any]]:
    """Writes ``answers/<stage>.jsonl`` below default_root_dir, an object an answer; a collective.

    answers: of this rank, with "index" and "cut".
    longest: tokens of an answer, to say what those that were cut were cut at.
    Returns: those of all ranks, by index.
    """
    if trainer.world_size > 1:
        gathered: list[Any] = [None] * trainer.world_size
        torch.distributed.all_gather_object(gathered, answers)
        answers = [answer for of_rank in gathered for answer in of_rank]
    answers = sorted(answers, key=lambda answer: int(answer["index"]))
    if trainer.is_global_zero:
        path = Path(trainer.default_root_dir) / "answers" / f"{stage}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers]
        path.write_text("".join(lines), encoding="utf-8")
        cut = sum(answer["cut"] for answer in answers)
        rank_zero_info(
            f"{stage}: {len(answers):,} answers written to {path}; {cut:,} were cut at {longest} "
            "tokens."
        )
    return answers
