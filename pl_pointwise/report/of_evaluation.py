"""The page of `test`: its metrics, and what the samples are that it found hardest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.seed import isolate_rng

from ..evaluation import BEFORE
from ..task import Task, notes_of
from .of_run import SAMPLES, ranked
from .page import Page, Sample, write_page
from .samples import fields_and_image


def write_test_page(
    module: Task, trainer: Trainer, metrics: Mapping[str, Mapping[str, str]], path: Path
) -> Path:
    """Writes the page of the evaluation that has just ended; to be called by one process.

    metrics: by name and data set, as `test` prints them.
    """
    facts = {
        "data": ", ".join(dict.fromkeys(s for of in metrics.values() for s in of)),
        "written": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "pl-pointwise": version("pl-pointwise"),
    }
    samples, answers = list[Sample](), list[Sample]()
    if not notes_of(module).confidential:
        with isolate_rng():  # Reading a row may draw.
            answers = [*_answers(trainer)]
            samples = answers or [*_hardest(module)]
    page = Page(
        title=f"{type(module).__name__.removesuffix('Module')}: test",
        facts=facts,
        metrics={name: _in_order(of) for name, of in metrics.items()},
        samples_title="Answers, before and now" if answers else "Samples, the hardest first",
        samples_of="data" if answers else "requirement",
        samples=samples[:SAMPLES],
        samples_note="" if len(samples) <= SAMPLES else f"The first {SAMPLES:,}.",
    )
    return write_page(path, page)


def _in_order(by_stage: Mapping[str, str]) -> dict[str, str]:
    """The starting model's columns before those of the trained one."""
    order = sorted(by_stage, key=lambda stage: (stage.removeprefix(BEFORE), not _is_before(stage)))
    return {stage: by_stage[stage] for stage in order}


def _is_before(stage: str) -> bool:
    return stage.startswith(BEFORE)


def _answers(trainer: Trainer) -> Iterator[Sample]:
    """What a language model answered, beside what it answered before and what was wanted."""
    for path in sorted((Path(trainer.default_root_dir) / "answers").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row: dict[str, Any] = json.loads(line)
            flags = [name for name in ("exact", "flipped", "refused", "cut") if row.get(name)]
            source = row.get("file")
            yield Sample(
                index=int(row["index"]),
                constraint=path.stem,
                bound="",
                value=None,
                violation=None,
                fields={"prompt": str(row.get("prompt", "")), "answer is": ", ".join(flags)},
                before=row.get("before"),
                wanted=row.get("wanted"),
                after=str(row.get("answer", "")),
                source=f"{source}, line {row.get('line')}" if source else None,
            )


def _hardest(module: Any) -> Iterator[Sample]:
    """The samples of all data sets with the largest violations, each requirement's in turn."""
    places = []
    for stage, by_constraint in module.evaluated.items():
        rows = module._evaluator.datasets.get(stage)
        for name, found in by_constraint.items():
            worst = found.worst()
            for rank, place in enumerate(ranked(worst)):
                index, violation = int(found.index[place]), float(worst[place])
                places.append((rank, stage, name, rows, index, violation))
    places.sort(key=lambda place: place[0])
    for _, stage, name, rows, index, violation in places[: SAMPLES + 1]:
        constraint = module.evaluation_constraints[name]
        fields, image = fields_and_image({} if rows is None else rows[index])
        yield Sample(
            index=index,
            constraint=f"{stage}: {name}",
            bound=constraint.in_words(),
            value=constraint.value_at(violation),
            violation=violation,
            fields=fields,
            image=image,
        )
