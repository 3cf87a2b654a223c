"""``pl-pointwise compare … --require``: what is refused before training, and from finished runs to
one model with its certificate.

The output folder then holds, besides the tables of the selection split, answer.md and .json, the
exported model/, and certification/ (uses.py). The predecessor is the first run's model before
training.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

from pandas import DataFrame, concat

from pl_pointwise.cli import PointwiseCLI, exports
from pl_pointwise.data import SPLITS, TRAIN, VAL
from pl_pointwise.errors import DataError
from pl_pointwise.export.command import class_of
from pl_pointwise.printing import Table, escaped
from pl_pointwise.requirements import Requirement, RequirementError
from pl_pointwise.requirements.answer import Answer, MeasuredModel, choose_model
from pl_pointwise.requirements.exported import (
    CHECKPOINT,
    SAMPLES,
    read_certificate,
    samples_by,
    write_certificate,
)
from pl_pointwise.requirements.p_values import are_zero_one
from pl_pointwise.requirements.samples import (
    Source,
    beside,
    contents_of,
    known_among,
    lines_about,
    losses_by_unit,
    marks_of,
    read_samples,
    require_known,
    units_in,
)
from pl_pointwise.requirements.uses import (
    NOT_ON_OLD_RECORDS,
    alone_with_the_record,
    check_unused,
    id_of,
    remember_use,
)
from pl_pointwise.task import notes_of

from .results import shared_objective
from .runs import Comparison, Outcome, Run, on_first_rank


def check_requirements(comparison: Comparison) -> DataFrame:
    """Refuses what cannot come to a certificate, before training; returns what the starting model
    measures, which requirements may compare with.
    """
    required = comparison.required  # What is no requirement is said before anything is loaded.
    _is_there(comparison.output / "model")
    start = PointwiseCLI.of_data([], comparison.runs[0].arguments)
    notes_of(start.model).confidential = True
    measured = samples_by(start, None, selection=True)
    training = Source(TRAIN.key, start.model._evaluator.datasets.get(TRAIN.key)).training_lines()
    samples = concat([measured, training])
    if not units_in(samples, VAL.key):
        raise RequirementError("There is no selection split. Hold out validation data.")
    require_separate_splits(samples)
    require_known(samples, required)
    for each in required:
        n = lines_about(samples.assign(before=samples["value"]), each)["unit"].nunique()
        needed = each.fewest_samples(comparison.confidence, _zero_one(samples, each))
        if n < needed:
            of = f" of category {each.category}" if each.category else ""
            raise RequirementError(
                f"{each.text!r}: certifying this at {100 * comparison.confidence:g} % takes at "
                f"least {needed:,} independent samples, all of them satisfied (or equal to the "
                f"predecessor's), and the certification split has {n:,}{of}. Hold out more, "
                "require less, or lower --confidence."
            )
    contents, first = contents_of(start.model), comparison.runs[0]
    check_unused(_use(comparison, contents), units_in(samples), comparison.output)
    ran_on = (first.result() or {}).get("data", contents)
    if changed := [name for name in contents if contents[name] != ran_on.get(name, contents[name])]:
        raise RequirementError(
            f"{' and '.join(changed)}: not what {first.title} was made with, though the options "
            "are the same. Put it back, or take another --output."
        )
    _refuse_model_of_other_data(comparison.output / "model", contents)
    return measured


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
        if both := known_among(units, marks):
            raise RequirementError(
                f"The {one.role} and the {other.role} split share {len(both):,} of {len(units):,} "
                "units (prompts, queries or records). Take what stands in both out of one "
                "(test_fraction, or a test file)."
            )


def answer_requirements(
    comparison: Comparison, outcomes: Sequence[Outcome], start: DataFrame
) -> Table | None:
    """Chooses, exports, writes the answer, once all runs are done: the split opens once.

    Returns the answer as a table; None on other ranks than the first, and where a run failed.

    start: of :func:`check_requirements`.
    """
    output, required = comparison.output, comparison.required
    if failed := [run.title for run, result in outcomes if "error" in result]:
        print(
            f"No answer yet: {len(failed)} of {len(outcomes)} runs failed "
            f"({', '.join(failed[:3])}). Mend them or take them out, and run the command again."
        )
        return None
    measured = list[MeasuredModel]()
    for run, result in outcomes:
        objective = result["metrics"].get(shared_objective([(run, result)]))
        if objective is None:
            raise RequirementError(f"{run.title}: there is no objective on the selection split.")
        samples = read_samples(run.folder / SAMPLES)
        require_separate_splits(samples)
        samples = samples[samples["dataset"] != TRAIN.key]
        if {*samples["unit"]} != {*start["unit"]}:
            raise RequirementError(
                f"{run.title} was evaluated on other samples than the starting model: what is held "
                "out must not depend on method or seed, nor change before the answer. Put it back, "
                "or take another --output."
            )
        measured.append(MeasuredModel(run.title, beside(samples, start, required), objective))
    weights = sorted(result["wrote"][CHECKPOINT] for _, result in outcomes)
    made_of = {name: _of_all(name, outcomes) for name in NOT_ON_OLD_RECORDS}
    use = {**_use(comparison, outcomes[0][1]["data"]), "weights": weights}
    use |= {name: found for name, found in made_of.items() if found}
    units = units_in(start)
    with alone_with_the_record():
        check_unused(use, units, output)
        there = _is_there(output / "model", id_of(use, units))
        found = choose_model(measured, required, comparison.confidence)
        if not on_first_rank():
            return None
        remember_use(use, units, output, output)  # Before anything of the split is shown.
    chosen = found.selection.position
    if chosen is not None and not there:
        run, result = outcomes[chosen]
        _export(run, found, output, id_of(use, units), result)
    table = found.table().markdown()
    text = f"# Answer\n\n{escaped(found.statement())}\n\n{table}"
    (output / "answer.md").write_text(text, encoding="utf-8")
    (output / "answer.json").write_text(json.dumps(found.as_dict(), indent=1), encoding="utf-8")
    more = "" if chosen is None else ", and the certified model is in model/"
    print(f"\n{found.statement()}\n\n{table}\nWritten to {output}: answer.md{more}")
    answer = found.table()
    return Table("Answer", f"{found.statement()}\n\n{answer.note}".strip(), answer.cells)


def _of_all(name: str, outcomes: Sequence[Outcome]) -> list[str]:
    """Digests of the runs' own code, or base models, each once; earlier versions have none."""
    found = set[str]()
    for _, result in outcomes:
        given = result.get(name)
        found.update(given.values() if isinstance(given, Mapping) else [given] if given else [])
    return sorted(found)


def _use(comparison: Comparison, contents: Mapping[str, str]) -> dict[str, Any]:
    """What certification samples are used for: the same use twice gives the same answer.

    contents: of the first run's data sets; those of other runs are in their weights.
    """
    paired = any(each.beside for each in comparison.required)
    return {
        "requirements": sorted(each.text for each in comparison.required),
        "confidence": comparison.confidence,
        "against": comparison.runs[0].title if paired else None,
        "runs": sorted(run.digest for run in comparison.runs),
        **contents,
    }


def _is_there(model: Path, use: str | None = None) -> bool:
    """Whether the folder is the model of a use, with all its files; refuses what is another's.

    use: None before training, where it is not known yet.
    """
    if not model.exists():
        return False
    with suppress(DataError):
        # What a user put beside it is no other model of this answer.
        if use in (None, read_certificate(model, others=False)[0].get("use")):
            return True
    of = "no comparison has written what is there" if use is None else "it is not of this answer"
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


def _export(run: Run, found: Answer, output: Path, use: str, result: Mapping[str, Any]) -> None:
    """Exports the model of a run as ``model/``, whole or not at all, from its certified file."""
    about = {"use": use, **{name: result.get(name) for name in ("data", "bounds", "base", "code")}}
    try:
        checkpoint = str(run.folder / CHECKPOINT)
        kind = class_of(checkpoint, [str(run.folder / "config.yaml")])
        with tempfile.TemporaryDirectory(prefix="export-", dir=output) as part:
            folder = Path(part) / "model"
            if exports(kind):
                module = kind.load_from_checkpoint(
                    checkpoint, map_location="cpu", weights_only=True
                )
                notes_of(module).certificate = escaped(found.statement())
                module.export(folder)
            else:
                print(f"{kind.__name__} has no export(): model/ holds its checkpoint.")
            write_certificate(folder, {**found.as_dict(), **about}, run.folder)
            folder.replace(output / "model")
    except Exception as error:
        raise RequirementError(
            f"{run.title} is certified, but its export failed, so there is no new model/ or "
            f"answer: {type(error).__name__}: {error}. Mend that, and run the same command again: "
            "it comes to the same answer."
        ) from error
