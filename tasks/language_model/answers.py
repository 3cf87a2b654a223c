"""The answers of an evaluation: whose prompts are answered, rates of them, and their files.

A task that has ``rates`` answers the prompts of the data sets in ``evaluation.answer_in``, of each
kind ``answers_at_most`` by a batch's "rank". The starting model answers the same ones, and an
answer knows what that one was. They go to ``answers/<data set>.jsonl``, which people read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from pl_pointwise.evaluation import BEFORE
from pl_pointwise.lagrangian.terms import PADDING
from pl_pointwise.task import Batch, Metrics, objects_of_all_ranks

from .before import kept_role, place_of, wanted_columns
from .model.generation import text_of_response
from .text.conversations import ConversationEncoder
from .text.records import Record

OR = "\n\nor:\n\n"
"""Between several texts that are wanted as the answer to one prompt."""

COLUMNS = (
    "index",
    "prompt",
    "wanted",
    "before",
    "answer",
    "exact",
    "flipped",
    "file",
    "line",
)
"""What stands first in a line of a file of answers, in this order, as far as it has them."""


@dataclass(frozen=True)
class Rate:
    """A metric: the mean over the answers of an entry of theirs.

    Args:
        entry: of an answer, such as "refused"; answers without it are not counted.
        value: what counts of it; of a flag 1 or 0.
        kind: of the prompts, as ``prompt_kind`` names it; None for all.
    """

    entry: str
    value: Callable[[Any], float] = float
    kind: str | None = None


class Answering(Protocol):
    """What answers need of their module."""

    evaluation: Any
    trainer: Any

    @property
    def rates(self) -> Mapping[str, Rate]:
        """Of answers."""

    @property
    def kept_roles(self) -> Sequence[str]:
        """Of answers that are to stay."""

    @property
    def encoder(self) -> ConversationEncoder:
        """Of texts."""

    def prompt_kind(self, record: Record) -> str:
        """Of which some rates are."""

    def batch_answers(
        self, batch: Batch, samples: Sequence[tuple[int, int]], stage: str
    ) -> list[dict[str, Any]]:
        """{index, answer, refused, cut} of some samples."""


class EvaluationAnswers:
    """The answers of one pass over the data sets.

    Attributes:
        by_data_set: generated in the last `test` or `validate` by this rank.
    """

    def __init__(self, module: Answering) -> None:
        self._module = module
        self.by_data_set: dict[str, list[dict[str, Any]]] = {}

    @property
    def rates(self) -> dict[str, Rate]:
        """The task's, and with any the share of answers that stop only at the length limit."""
        of_task = self._module.rates
        return {**of_task, "cut": Rate("cut")} if of_task else {}

    @property
    def data_sets(self) -> list[str]:
        """The data sets of this pass whose prompts are answered: none in validation in training."""
        trainer = self._module.trainer
        wanted = self._module.evaluation.answer_in if self._module.rates else []
        # `validate` has one data set, which stands for the one of `test`.
        if trainer.state.fn == TrainerFn.VALIDATING:
            return ["val"] if "test" in wanted else []
        return list(wanted) if trainer.testing else []

    def add(self, metrics: Metrics, batch: Batch, stage: str) -> None:
        """Answers the prompts of a batch that are among the first of their kind, and counts."""
        module = self._module
        if not metrics["cut"].update_called:  # Fresh metrics: another pass.
            self.by_data_set[stage] = []
        limit = module.evaluation.answers_at_most
        ranks = batch["rank"].tolist()
        asked = real_samples(batch)
        # The rank counts within a category, so each of them gets as many answers.
        if limit is not None:
            asked = [(row, index) for row, index in asked if ranks[row] < limit]
        if not asked:
            return
        answers = module.batch_answers(batch, asked, stage)
        records = [batch["records"][row] for row, _ in asked]
        for answer, (row, _), record in zip(answers, asked, records, strict=True):
            answer |= self._about(batch, row, record)
        self.by_data_set[stage] += answers
        self._count(
            metrics, answers, [module.prompt_kind(record) for record in records]
        )

    def _about(self, batch: Batch, row: int, record: Record) -> dict[str, Any]:
        """What the file of answers has beside an answer: prompt, what is wanted, and its place."""
        about: dict[str, Any] = {"prompt": record.text}
        kept_roles = self._module.kept_roles
        wanted = []
        for column in wanted_columns(record, kept_roles):
            text = text_of_response(self._module.encoder, batch, row, column)
            wanted.append(text.strip())
        if wanted:
            about["wanted"] = OR.join(wanted)
        about["kept"] = kept_role(record, kept_roles) != ""
        return about | place_of(record)

    def _count(
        self,
        metrics: Metrics,
        answers: Sequence[Mapping[str, Any]],
        kinds: Sequence[str],
    ) -> None:
        """Adds answers, to prompts of some kinds, to the rates that they have part in."""
        for name, rate in self.rates.items():
            if name not in metrics:
                continue
            index = []
            values = []
            for answer, kind in zip(answers, kinds, strict=True):
                if rate.kind in (None, kind) and rate.entry in answer:
                    index.append(answer["index"])
                    values.append(float(rate.value(answer[rate.entry])))
            # A rate without an update is NaN: no such prompt was asked.
            if index:
                device = metrics[name].device
                metrics[name].update(
                    torch.tensor(index).to(device), torch.tensor(values).to(device)
                )

    def finish(self, metrics: Mapping[str, Metrics]) -> bool:
        """Joins the answers of the two models; whether this pass was one that may answer."""
        answered = [name for name in metrics if name in self.data_sets]
        if not answered and not self._module.trainer.testing:
            return False  # A validation during training.
        of_this_pass: dict[str, list[dict[str, Any]]] = {}
        for name in (*answered, *[f"{BEFORE}{name}" for name in answered]):
            if name in metrics:
                # Answers of an earlier pass are there still where this one asked for none.
                asked = metrics[name]["cut"].update_called
                of_this_pass[name] = self.by_data_set[name] if asked else []
        self.by_data_set = {name: of_this_pass[name] for name in answered}
        for name, answers in self.by_data_set.items():
            before = of_this_pass.get(f"{BEFORE}{name}", [])
            self._join_before(answers, before, metrics[name])
        return True

    def _join_before(
        self,
        answers: list[dict[str, Any]],
        others: Sequence[dict[str, Any]],
        metrics: Metrics,
    ) -> None:
        """Gives this rank's answers {before}, and those that are to stay {flipped}, and counts it.

        others: the starting model's answers to the same prompts.
        """
        before = {other["index"]: other["answer"] for other in others}
        for answer in answers:
            # For this alone: no column of the file.
            kept = answer.pop("kept")
            if answer["index"] in before:
                answer["before"] = before[answer["index"]]
                if kept:
                    answer["flipped"] = answer["answer"] != answer["before"]
        # Counted only now, as it takes the answers of both models.
        if "flipped" in metrics:
            flipped = [answer for answer in answers if "flipped" in answer]
            self._count({"flipped": metrics["flipped"]}, flipped, [""] * len(flipped))

    def write(self) -> dict[str, list[dict[str, Any]]]:
        """Writes the answers of all ranks, and returns them by data set and index."""
        return {name: self._write(name) for name in self.by_data_set}

    def _write(self, stage: str) -> list[dict[str, Any]]:
        trainer = self._module.trainer
        gathered = chain.from_iterable(objects_of_all_ranks(self.by_data_set[stage]))
        answers = sorted(gathered, key=lambda answer: int(answer["index"]))
        if trainer.is_global_zero:
            path = Path(trainer.default_root_dir) / "answers" / f"{stage}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = []
            for answer in answers:
                lines.append(json.dumps(_in_order(answer), ensure_ascii=False) + "\n")
            path.write_text("".join(lines), encoding="utf-8")
            rank_zero_info(f"{stage}: {_in_words(answers)}: read {path}.")
        return answers


def real_samples(batch: Batch) -> list[tuple[int, int]]:
    """(position in the batch, index) of the samples of a batch that do not only fill it."""
    samples = []
    for position, index in enumerate(batch["index"].tolist()):
        if index != PADDING:
            samples.append((position, index))
    return samples


def _in_order(answer: Mapping[str, Any]) -> dict[str, Any]:
    """An answer with what people read first in front."""
    first = {name: answer[name] for name in COLUMNS if name in answer}
    return first | {name: value for name, value in answer.items() if name not in first}


def _in_words(answers: Sequence[Mapping[str, Any]]) -> str:
    """How many answers there are, and how many were cut or have changed."""
    cut = sum(answer["cut"] for answer in answers)
    kept = [answer["flipped"] for answer in answers if "flipped" in answer]
    changed = ""
    if kept:
        changed = (
            f"; {sum(kept):,} of {len(kept):,} that are to stay are other texts now"
        )
    return f"{len(answers):,} answers, {cut:,} of them cut{changed}"
