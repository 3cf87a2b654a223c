"""``compare … --require``: what is refused before training.

A requirement has to be one that the data can certify, on samples that certify nothing else. The
predecessor is the first run's model before training.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

from pandas import DataFrame, concat

from pl_pointwise.cli import PointwiseCLI
from pl_pointwise.data import SPLITS, TRAIN, VAL
from pl_pointwise.errors import DataError
from pl_pointwise.requirements import Requirement, RequirementError
from pl_pointwise.requirements.exported import read_certificate, samples_by
from pl_pointwise.requirements.p_values import are_zero_one
from pl_pointwise.requirements.samples import (
    contents_of,
    known_among,
    lines_about,
    losses_by_unit,
    marks_of,
    require_known,
    units_in,
)
from pl_pointwise.requirements.source import Source
from pl_pointwise.requirements.uses import check_unused
from pl_pointwise.task import notes_of

from .runs import Comparison, Run


def check_requirements(comparison: Comparison) -> DataFrame:
    """Refuses what cannot come to a certificate, before training; returns what the starting model
    measures, which requirements may compare with.
    """
    # What is no requirement is said before anything is loaded.
    required = comparison.required
    is_there(comparison.output / "model")
    first = comparison.runs[0]
    start = PointwiseCLI.of_data([], first.arguments)
    notes_of(start.model).confidential = True
    measured = samples_by(start, None, selection=True)
    training = Source(
        TRAIN.key, start.model._evaluator.datasets.get(TRAIN.key)
    ).training_lines()
    samples = concat([measured, training])
    if not units_in(samples, VAL.key):
        raise RequirementError("There is no selection split. Hold out validation data.")
    require_separate_splits(samples)
    require_known(samples, required)
    for requirement in required:
        _require_enough(samples, requirement, comparison.confidence)
    contents = contents_of(start.model)
    check_unused(use_of(comparison, contents), units_in(samples), comparison.output)
    _require_same_data(contents, first)
    _refuse_model_of_other_data(comparison.output / "model", contents)
    return measured


def _require_enough(
    samples: DataFrame, requirement: Requirement, confidence: float
) -> None:
    """Refuses a requirement that the certification split cannot certify at its best."""
    # Beside the starting model nothing is lost yet: each sample's value is its own predecessor's.
    lines = lines_about(samples.assign(before=samples["value"]), requirement)
    n = lines["unit"].nunique()
    needed = requirement.fewest_samples(confidence, _zero_one(samples, requirement))
    if n < needed:
        of = f" of category {requirement.category}" if requirement.category else ""
        raise RequirementError(
            f"{requirement.text!r}: certifying this at {100 * confidence:g} % takes at least "
            f"{needed:,} independent samples, all of them satisfied (or equal to the "
            f"predecessor's), and the certification split has {n:,}{of}. Hold out more, require "
            "less, or lower --confidence."
        )


def _require_same_data(contents: Mapping[str, str], first: Run) -> None:
    """Refuses data that are not those of the first run, if it has a result."""
    ran_on = (first.result() or {}).get("data", contents)
    changed = []
    for name, content in contents.items():
        if content != ran_on.get(name, content):  # An earlier version kept fewer.
            changed.append(name)
    if changed:
        raise RequirementError(
            f"{' and '.join(changed)}: not what {first.title} was made with, though the options "
            "are the same. Put it back, or take another --output."
        )


def _zero_one(samples: DataFrame, requirement: Requirement) -> bool | None:
    """Whether a metric's losses look like 0 and 1 on the selection split, which chooses the test;
    None where the requirement says it.
    """
    if requirement.kind == "constraint" or requirement.beside:
        return None
    lines = lines_about(samples, requirement, VAL.key)
    return bool(len(lines)) and are_zero_one(losses_by_unit(lines, requirement))


def require_separate_splits(samples: DataFrame) -> None:
    """Refuses units that stand in two splits of a table; those of the training data among them."""
    for one, other in combinations(SPLITS.values(), 2):
        units = units_in(samples, other.key)
        marks = marks_of(samples[samples["dataset"] == one.key])
        both = known_among(units, marks)
        if both:
            raise RequirementError(
                f"The {one.role} and the {other.role} split share {len(both):,} of {len(units):,} "
                "units (prompts, queries or records). Take what stands in both out of one "
                "(test_fraction, or a test file)."
            )


def use_of(comparison: Comparison, contents: Mapping[str, str]) -> dict[str, Any]:
    """What certification samples are used for: the same use twice gives the same answer.

    contents: of the first run's data sets; those of other runs are in their weights.
    """
    required = comparison.required
    paired = any(requirement.beside for requirement in required)
    return {
        "requirements": sorted(requirement.text for requirement in required),
        "confidence": comparison.confidence,
        "against": comparison.runs[0].title if paired else None,
        "runs": sorted(run.digest for run in comparison.runs),
        **contents,
    }


def is_there(model: Path, use: str | None = None) -> bool:
    """Whether the folder is the model of a use, with all its files; refuses what is another's.

    use: None before training, where it is not known yet.
    """
    if not model.exists():
        return False
    with suppress(DataError):
        # What a user put beside it is no other model of this answer.
        if use in (None, read_certificate(model, others=False)[0].get("use")):
            return True
    of = (
        "no comparison has written what is there"
        if use is None
        else "it is not of this answer"
    )
    raise _another_model(model, of)


def _refuse_model_of_other_data(model: Path, contents: Mapping[str, str]) -> None:
    """Before training, where the model that is there was certified on other data."""
    was = None
    with suppress(DataError):
        was = read_certificate(model, others=False)[0].get("data")
    if isinstance(was, dict) and was != contents:
        raise _another_model(model, "it is not of this answer")


def _another_model(model: Path, why: str) -> RequirementError:
    return RequirementError(f"{model}: {why}. Move it, or take another --output.")
