"""Answers in an evaluation: prompts are answered, the answers counted, and written to files.

A task's evaluation has ``answer_in``, the data sets of `test` whose prompts are answered, and
``answers_at_most``, so many of each kind by a batch's "rank". Its module has a table of rates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torchmetrics import Metric

from pl_pointwise.data import PADDING
from pl_pointwise.evaluation import MeanBySample
from pl_pointwise.task import Batch, notes_of

if TYPE_CHECKING:
    from .module import LanguageModelModule


@dataclass(frozen=True)
class Rate:
    """A metric: the mean over the answers of an entry of theirs.

    Args:
        entry: of an answer, such as "refused"; answers without it are not counted.
        value: what counts of it; of a flag 1 or 0.
        kind: of the prompts, as ``prompt_kind`` names it; None for all.
        higher_is_better: None for neither.
    """

    entry: str
    value: Callable[[Any], float] = float
    kind: str | None = None
    higher_is_better: bool | None = True

    def metric(self) -> MeanBySample:
        return MeanBySample(self.higher_is_better)


def rates_of(module: LanguageModelModule) -> dict[str, Rate]:
    """The task's rates, and with any the share of answers that stop only at the length limit."""
    cut = Rate("cut", higher_is_better=False)
    return {**module.rates, "cut": cut} if module.rates else {}


def real_samples(batch: Batch) -> list[tuple[int, int]]:
    """(position in the batch, index) of the samples of a batch that do not only fill it."""
    return [each for each in enumerate(batch["index"].tolist()) if each[1] != PADDING]


def answer_batch(
    module: LanguageModelModule, metrics: Mapping[str, Metric], batch: Batch, stage: str
) -> None:
    """Answers the prompts of a batch that are among the first of their kind, and counts."""
    if stage not in _answered(module):
        return
    if not metrics["cut"].update_called:  # Fresh metrics: another pass.
        module.answers[stage] = []
    limit, ranks = module.evaluation.answers_at_most, batch["rank"].tolist()
    asked = [each for each in real_samples(batch) if limit is None or ranks[each[0]] < limit]
    if not asked:
        return
    new = module.batch_answers(batch, asked, stage)
    module.answers[stage] += new
    kinds = [module.prompt_kind(batch["records"][row]) for row, _ in asked]
    for name, rate in rates_of(module).items():
        of_kind = (each for each, kind in zip(new, kinds, strict=True) if rate.kind in (None, kind))
        if counted := [answer for answer in of_kind if rate.entry in answer]:
            index = torch.tensor([answer["index"] for answer in counted], dtype=torch.long)
            values = torch.tensor([float(rate.value(answer[rate.entry])) for answer in counted])
            device = metrics[name].device
            metrics[name].update(index.to(device), values.to(device))


def finish_answers(
    module: LanguageModelModule, metrics: Mapping[str, Mapping[str, Metric]]
) -> None:
    """Writes and reports the answers of a `test` or `validate`."""
    answered = {name: metrics[name] for name in metrics if name in _answered(module)}
    if not answered and not module.trainer.testing:  # A validation during training.
        return
    module.answers = {
        name: module.answers[name] if of_it["cut"].update_called else []
        for name, of_it in answered.items()
    }
    if not notes_of(module).confidential:
        module.report_answers({name: _write(module, name) for name in answered})


def _answered(module: LanguageModelModule) -> list[str]:
    """The data sets of this pass whose prompts are answered: none in validation in training."""
    wanted = module.evaluation.answer_in if module.rates else []
    if module.trainer.state.fn == TrainerFn.VALIDATING:
        return ["val"] if "test" in wanted else []
    return list(wanted) if module.trainer.testing else []


def _write(module: LanguageModelModule, stage: str) -> list[dict[str, Any]]:
    """Writes the answers of all ranks to one data set, and returns them by index."""
    trainer, answers = module.trainer, module.answers[stage]
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
        rank_zero_info(f"{stage}: {len(answers):,} answers, {cut:,} of them cut, are in {path}.")
    return answers
