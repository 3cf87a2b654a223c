"""The page of ``test``: its metrics, the hardest samples of every data set, and answers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.seed import isolate_rng

from ..data import title_of
from ..evaluation import BEFORE, SampleViolations
from ..module import PointwiseModule
from .of_run import SAMPLES, in_turn, ranked_by
from .page import Page, Sample, write_if_possible
from .samples import described, source_of, without_source

Answers = Mapping[int, Mapping[str, Any]]
"""By the index of their samples: the lines of a file of answers."""


def write_test_page(
    module: PointwiseModule,
    trainer: Trainer,
    path: Path,
    samples: Mapping[str, int],
    model: str,
) -> Path | None:
    """Writes the page of the module's last ``test``; to be called by one process.

    Args:
        module: that was tested.
        trainer: that tested it, whose logged metrics are shown.
        path: of the page.
        samples: of how many a metric is, by name, where that is known.
        model: which weights were tested, in words.
    """
    return write_if_possible(
        path, lambda: page_of_test(module, trainer, samples, model)
    )


def page_of_test(
    module: PointwiseModule, trainer: Trainer, samples: Mapping[str, int], model: str
) -> Page:
    """What the last ``test`` of a module measured."""
    answers = {
        stage: _answers(trainer, stage) for stage in getattr(module, "answers", {})
    }
    shown = list[Sample]()
    with isolate_rng():  # Reading a row may draw.
        for stage in module.evaluated:
            # The starting model's answers stand beside those of the trained one.
            if not stage.startswith(BEFORE):
                shown += _samples(module, trainer, stage, answers.get(stage, {}))
    title = "Samples, the hardest first"
    if any(answers.values()):
        title += ", and answers"
    return Page(
        title=f"{type(module).__name__.removesuffix('Module')}: a test",
        facts={
            "model": model,
            "written": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "pl-pointwise": version("pl-pointwise"),
        },
        metrics=by_name(trainer.callback_metrics, samples),
        samples=shown,
        samples_title=title,
        samples_note="Values are in the unit of each requirement's bound.",
    )


def by_name(
    metrics: Mapping[str, Any], samples: Mapping[str, int]
) -> dict[str, dict[str, str]]:
    """Metrics by name and data set, as text, of how many in brackets."""
    cells: dict[str, dict[str, str]] = {}
    for key, value in metrics.items():
        stage, _, name = key.partition("/")
        of = f" ({samples[key]:,})" if key in samples else ""
        cells.setdefault(name, {})[stage] = f"{float(value):.4g}{of}"
    for name, by_stage in cells.items():
        stages = sorted(by_stage, key=_before_after)
        cells[name] = {stage: by_stage[stage] for stage in stages}
    return cells


def _before_after(stage: str) -> tuple[str, bool]:
    """Sorts the starting model's column before that of the trained one."""
    return stage.removeprefix(BEFORE), not stage.startswith(BEFORE)


def _samples(
    module: PointwiseModule, trainer: Trainer, stage: str, answers: Answers
) -> Iterator[Sample]:
    """The hardest of a data set, each with its answer; then the other answers."""
    evaluated = module.evaluated[stage]
    worst = {name: violations.worst() for name, violations in evaluated.items()}
    ranked = {name: ranked_by(of_samples) for name, of_samples in worst.items()}
    shown = set()
    for name, row in in_turn(ranked)[:SAMPLES]:
        sample = _violation(module, name, evaluated[name], row, float(worst[name][row]))
        shown.add(sample.index)
        yield _with_text(sample, module, trainer, stage, answers.get(sample.index, {}))
    rest = [index for index in answers if index not in shown]
    for index in rest[: max(SAMPLES - len(shown), 0)]:
        yield _with_text(Sample(index), module, trainer, stage, answers[index])


def _violation(
    module: PointwiseModule,
    name: str,
    evaluated: SampleViolations,
    row: int,
    violation: float,
) -> Sample:
    """A row of what was evaluated under one requirement."""
    constraint = module.evaluation_constraints[name]
    # Of NaN, or of an infinite violation, there is no value in the unit of the bound.
    known = math.isfinite(violation)
    return Sample(
        index=int(evaluated.index[row]),
        constraint=name,
        bound=constraint.in_words(),
        value=constraint.value_at(violation) if known else None,
        violation=violation,
    )


def _with_text(
    sample: Sample,
    module: PointwiseModule,
    trainer: Trainer,
    stage: str,
    answer: Mapping[str, Any],
) -> Sample:
    """The sample with what it is and, where there is one, with its answer."""
    fields: dict[str, str]
    image = None
    # The text that was answered, templates and all: more than the row.
    if "prompt" in answer:
        fields = {"prompt": str(answer["prompt"])}
    else:
        rows = module._evaluator.datasets.get(stage)
        fields, image = described(
            getattr(trainer, "datamodule", None), rows, sample.index, stage
        )
    source = source_of(fields)
    if "file" in answer:
        line = f", line {answer['line']}" if "line" in answer else ""
        source = f"{Path(answer['file']).name}{line}"
    judgements = [
        name for name in ("exact", "refused", "flipped", "cut") if answer.get(name)
    ]
    if judgements:
        fields["the answer is"] = ", ".join(judgements)
    return replace(
        sample,
        fields=without_source(fields),
        image=image,
        source=source,
        dataset=title_of(stage),
        before=_text(answer, "before"),
        wanted=_text(answer, "wanted"),
        after=_text(answer, "answer"),
    )


def _text(answer: Mapping[str, Any], name: str) -> str | None:
    """An entry of an answer, which files of earlier versions lack."""
    return None if answer.get(name) is None else str(answer[name])


def _answers(trainer: Trainer, stage: str) -> dict[int, dict[str, Any]]:
    """The lines of a language task's file of answers to a data set, which this test wrote."""
    path = Path(trainer.default_root_dir) / "answers" / f"{stage}.jsonl"
    answers: dict[int, dict[str, Any]] = {}
    with suppress(OSError):  # None were generated.
        for line in path.read_text(encoding="utf-8").splitlines():
            answer = json.loads(line)
            answers[int(answer["index"])] = answer
    return answers
