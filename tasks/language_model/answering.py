"""Answers that an evaluation asks for: of which data sets, how they count, and where they go."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torchmetrics import Metric

from .module import real_samples
from .refusals import is_refusal
from .responses import ResponseModule
from .scoring import ResponseStatistics


class AnsweringModule(ResponseModule):
    """A module whose evaluation lets the model answer prompts, and counts and writes the answers.

    ``evaluation`` has ``answer_in``, the data sets of `test` whose prompts are answered, and
    ``answers_at_most``, so many of each kind by a batch's "rank"; metrics have "kl", "cut" and
    those of ``rates``.

    Attributes:
        answers: generated in the last `test` or `validate` by this rank, by data set.
    """

    rates: ClassVar[Mapping[str, tuple[Any, bool]]]
    """By metric: the kind of its prompts, and whether it counts the answers that refuse."""
    kind_key: ClassVar[str]
    """What a batch calls the kind of each prompt."""

    answers: dict[str, list[dict[str, Any]]]

    def update_evaluation_metrics(
        self,
        metrics: dict[str, Metric],
        outputs: ResponseStatistics,
        batch: dict[str, Any],
        real: Tensor,
        stage: str,
    ) -> None:
        """Adds the KL of a batch, and answers to its prompts where they are asked for.

        real: bool (B,), False for samples that only fill the batch.
        """
        self.add_divergence(metrics["kl"], outputs, batch, real)
        if stage in self._answered():
            self._answer(metrics, batch, stage)

    def _answered(self) -> list[str]:
        """The data sets of this pass whose prompts are answered: none of a validation in a fit."""
        wanted = self.evaluation.answer_in
        if self.trainer.state.fn == TrainerFn.VALIDATING:
            return ["val"] if "test" in wanted else []
        return list(wanted) if self.trainer.testing else []

    def _answer(self, metrics: Mapping[str, Metric], batch: Mapping[str, Any], stage: str) -> None:
        """Answers the prompts of a batch that are among the first of their kind."""
        if not metrics["cut"].update_called:  # Fresh metrics: another pass.
            self.answers[stage] = []
        limit, ranks = self.evaluation.answers_at_most, batch["rank"].tolist()
        asked = [
            (row, index)
            for row, index in real_samples(batch)
            if limit is None or ranks[row] < limit
        ]
        if not asked:
            return
        new = self._answers_to(batch, asked, stage)
        self.answers[stage] += new
        self._add_rates(metrics, new, [batch[self.kind_key][row] for row, _ in asked])

    def _add_rates(
        self, metrics: Mapping[str, Metric], answers: Sequence[dict[str, Any]], kinds: Sequence[Any]
    ) -> None:
        """Adds what holds of new answers; kinds: of the prompt of each."""
        add_answers(metrics["cut"], answers, [answer["cut"] for answer in answers])
        for name, (kind, refused) in self.rates.items():
            of_it = [answer for answer, own in zip(answers, kinds, strict=True) if own == kind]
            if of_it:
                values = [answer["refused"] == refused for answer in of_it]
                add_answers(metrics[name], of_it, values)

    def _answers_to(
        self, batch: Mapping[str, Any], samples: Sequence[tuple[int, int]], stage: str
    ) -> list[dict[str, Any]]:
        """{index, answer, refused, cut} of some samples of a batch.

        samples: (position in the batch, index) of each, one at least. stage: the data set's name.
        """
        rows = [row for row, _ in samples]
        new = self.generate(batch["prompt_ids"][rows], batch["prompt_lengths"][rows])
        return [
            {"index": index, "answer": text, "refused": is_refusal(text), "cut": cut}
            for (_, index), text, cut in zip(samples, new.texts, new.cut, strict=True)
        ]

    def finish_evaluation_metrics(self, metrics: dict[str, dict[str, Metric]]) -> None:
        """Writes the answers of a `test` or `validate` to ``answers/<data set>.jsonl``.

        Below the trainer's default_root_dir, an object an answer; none of a confidential model.
        """
        answered = {name: metrics[name] for name in metrics if name in self._answered()}
        if not answered and not self.trainer.testing:  # A validation within a fit.
            return
        self.answers = {
            name: self.answers[name] if of_it["cut"].update_called else []
            for name, of_it in answered.items()
        }
        self.judge_answers(answered)
        if self.notes.confidential:
            return
        self.report_answers({name: self._write(name) for name in answered})

    def _write(self, stage: str) -> list[dict[str, Any]]:
        """Writes the answers of all ranks to one data set, and returns them by index."""
        answers = self.answers[stage]
        if self.trainer.world_size > 1:
            gathered: list[Any] = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(gathered, answers)
            answers = [answer for of_rank in gathered for answer in of_rank]
        answers = sorted(answers, key=lambda answer: int(answer["index"]))
        if self.trainer.is_global_zero:
            path = Path(self.trainer.default_root_dir) / "answers" / f"{stage}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers]
            path.write_text("".join(lines), encoding="utf-8")
            cut = sum(answer["cut"] for answer in answers)
            rank_zero_info(
                f"{stage}: {len(answers):,} answers written to {path}; {cut:,} were cut at "
                f"{self.generation.max_new_tokens} tokens."
            )
        return answers

    def judge_answers(self, metrics: Mapping[str, Mapping[str, Metric]]) -> None:
        """Adds to the answers of this rank, and to the metrics, before they are written."""

    def report_answers(self, answers: Mapping[str, Sequence[dict[str, Any]]]) -> None:
        """Writes more of the answers of all ranks, by data set; called on every rank."""

    def predict_step(
        self, batch: dict[str, Any], batch_idx: int = 0, dataloader_idx: int = 0
    ) -> list[dict[str, Any]]:
        """{index, answer, refused, cut} of each prompt; filling samples give none."""
        samples = real_samples(batch)
        return self._answers_to(batch, samples, "predict") if samples else []


def add_answers(
    metric: Metric, answers: Sequence[Mapping[str, Any]], values: Sequence[bool]
) -> None:
    """Adds what holds of each answer, by its "index", to a mean over samples."""
    index = torch.tensor([answer["index"] for answer in answers], device=metric.device).long()
    metric.update(index, torch.tensor(values, device=metric.device).float())
