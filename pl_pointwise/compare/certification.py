"""``compare … --require``: from finished runs to one model with its certificate.

The output folder then holds, besides the tables of the selection split, answer.md and .json, the
exported model/, and certification/ (uses.py).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pandas import DataFrame

from pl_pointwise.command_line.next_steps import exports
from pl_pointwise.data import TRAIN
from pl_pointwise.export.command import class_of
from pl_pointwise.printing import Table, escaped
from pl_pointwise.requirements import RequirementError
from pl_pointwise.requirements.answer import Answer, MeasuredModel, choose_model
from pl_pointwise.requirements.exported import CHECKPOINT, SAMPLES, write_certificate
from pl_pointwise.requirements.samples import beside, read_samples, units_in
from pl_pointwise.requirements.uses import (
    NOT_ON_OLD_RECORDS,
    alone_with_the_record,
    check_unused,
    id_of,
    remember_use,
)
from pl_pointwise.task import notes_of

from .preconditions import is_there, require_separate_splits, use_of
from .runs import Comparison, Outcome, Run, on_first_rank
from .tables import shared_objective


def answer_requirements(
    comparison: Comparison, outcomes: Sequence[Outcome], start: DataFrame
) -> Table | None:
    """Chooses, exports, writes the answer, once all runs are done: the split opens once.

    Returns the answer as a table; None on other ranks than the first, and where a run failed.

    start: of :func:`~pl_pointwise.compare.preconditions.check_requirements`.
    """
    output = comparison.output
    failed = [run.title for run, result in outcomes if "error" in result]
    if failed:
        print(
            f"No answer yet: {len(failed)} of {len(outcomes)} runs failed "
            f"({', '.join(failed[:3])}). Mend them or take them out, and run the command again."
        )
        return None
    measured = [_measured(comparison, outcome, start) for outcome in outcomes]
    use = _use_of_these_models(comparison, outcomes)
    units = units_in(start)
    with alone_with_the_record():
        check_unused(use, units, output)
        # The same command after an interruption: what was exported is this answer's, and stays.
        there = is_there(output / "model", id_of(use, units))
        answer = choose_model(measured, comparison.required, comparison.confidence)
        if not on_first_rank():
            return None
        # Before anything of the split is shown.
        remember_use(use, units, output, output)
    chosen = answer.selection.position
    if chosen is not None and not there:
        run, result = outcomes[chosen]
        _export(run, answer, output, id_of(use, units), result)
    table = answer.table()
    _write_answer(answer, table, output)
    return Table("Answer", f"{answer.statement()}\n\n{table.note}".strip(), table.cells)


def _measured(
    comparison: Comparison, outcome: Outcome, start: DataFrame
) -> MeasuredModel:
    """What a run's model measures, beside the starting model."""
    run, result = outcome
    objective = result["metrics"].get(shared_objective([outcome]))
    if objective is None:
        raise RequirementError(
            f"{run.title}: there is no objective on the selection split."
        )
    samples = read_samples(run.folder / SAMPLES)
    require_separate_splits(samples)
    samples = samples[samples["dataset"] != TRAIN.key]
    # What is held out may depend on a seed of the data; then models were compared on other inputs.
    if {*samples["unit"]} != {*start["unit"]}:
        raise RequirementError(
            f"{run.title} was evaluated on other samples than the starting model: what is held "
            "out must not depend on method or seed, nor change before the answer. Put it back, "
            "or take another --output."
        )
    return MeasuredModel(
        run.title, beside(samples, start, comparison.required), objective
    )


def _use_of_these_models(
    comparison: Comparison, outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    """What the samples are used for, now that the weights are known."""
    _, first = outcomes[0]
    use = use_of(comparison, first["data"])
    # Sorted: the order of methods in their file makes no other use.
    use["weights"] = sorted(result["wrote"][CHECKPOINT] for _, result in outcomes)
    for name in NOT_ON_OLD_RECORDS:
        digests = _of_all(name, outcomes)
        if digests:
            use[name] = digests
    return use


def _write_answer(answer: Answer, table: Table, output: Path) -> None:
    cells = table.markdown()
    text = f"# Answer\n\n{escaped(answer.statement())}\n\n{cells}"
    (output / "answer.md").write_text(text, encoding="utf-8")
    (output / "answer.json").write_text(
        json.dumps(answer.as_dict(), indent=1), encoding="utf-8"
    )
    certified = answer.selection.position is not None
    more = ", and the certified model is in model/" if certified else ""
    print(f"\n{answer.statement()}\n\n{cells}\nWritten to {output}: answer.md{more}")


def _of_all(name: str, outcomes: Sequence[Outcome]) -> list[str]:
    """Digests of the runs' own code, or base models, each once; earlier versions have none."""
    digests = set[str]()
    for _, result in outcomes:
        of_run = result.get(name)
        if isinstance(of_run, Mapping):  # By the name of each base.
            digests.update(of_run.values())
        elif of_run:
            digests.add(of_run)
    return sorted(digests)


def _export(
    run: Run, answer: Answer, output: Path, use: str, result: Mapping[str, Any]
) -> None:
    """Exports the model of a run as ``model/``, whole or not at all, from its certified file."""
    certificate = {**answer.as_dict(), "use": use}
    for name in ("data", "bounds", "base", "code"):
        certificate[name] = result.get(name)
    try:
        checkpoint = str(run.folder / CHECKPOINT)
        kind = class_of(checkpoint, [str(run.folder / "config.yaml")])
        # Beside model/, on the same disk, so that it is renamed in one step.
        with tempfile.TemporaryDirectory(prefix="export-", dir=output) as part:
            folder = Path(part) / "model"
            if exports(kind):
                module = kind.load_from_checkpoint(
                    checkpoint, map_location="cpu", weights_only=True
                )
                notes_of(module).certificate = escaped(answer.statement())
                module.export(folder)
            else:
                print(f"{kind.__name__} has no export(): model/ holds its checkpoint.")
            write_certificate(folder, certificate, run.folder)
            folder.replace(output / "model")
    except Exception as error:
        raise RequirementError(
            f"{run.title} is certified, but its export failed, so there is no new model/ or "
            f"answer: {type(error).__name__}: {error}. Mend that, and run the same command again: "
            "it comes to the same answer."
        ) from error
