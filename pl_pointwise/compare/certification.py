"""``pl-pointwise compare … --require``: from finished runs to one model with its certificate.

The output folder then holds, besides the tables of the selection split, answer.md and .json, the
exported model/, certification/ (uses.py) and what a predecessor measures, predecessor.parquet.
"""

from __future__ import annotations

import gc
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Trainer
from pandas import DataFrame, read_parquet

from pl_pointwise.cli import PointwiseCLI
from pl_pointwise.evaluation import SampleViolations
from pl_pointwise.module import PointwiseModule
from pl_pointwise.requirements import Requirement, RequirementError
from pl_pointwise.requirements.answer import Answer, MeasuredModel, choose_model
from pl_pointwise.requirements.beforehand import check_splits, held_out_loaders, samples_to_come
from pl_pointwise.requirements.exported import (
    CHECKPOINT,
    START,
    is_certified,
    model_files,
    own_classes_only,
    samples_by,
    write_certificate,
)
from pl_pointwise.requirements.samples import (
    SELECTION,
    Bounds,
    beside,
    bounds_of,
    certification_units,
    hash_of,
    known_from,
    require_same_bounds,
    units_at,
)
from pl_pointwise.task import notes_of

from .levers import advice
from .runner import alone_in, on_first_rank
from .runs import SAMPLES, TESTED, Comparison, Run
from .tables import Table
from .uses import check_unused, remember_use

TO_SET_UP_DATA: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "limit_val_batches": 0,
    "limit_test_batches": 0,
    "logger": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
}


def check_requirements(comparison: Comparison, cli: PointwiseCLI, measure: bool = True) -> None:
    """Refuses what cannot come to a certificate, before training; ``measure`` the predecessor."""
    requirements = _requirements(comparison)
    _replaceable(comparison.output)
    trainer, data = Trainer(**TO_SET_UP_DATA), cli.datamodule
    trainer.validate(cli.model, data, verbose=False)
    trainer.test(cli.model, data, verbose=False)
    samples = samples_to_come(cli.model, held_out_loaders(data or cli.model))
    trained = getattr(data, "datasets", {}).get("train", ())
    units = [hash_of(unit) for unit in units_at(range(len(trained)), "train", trained)]
    check_splits(samples, units, requirements, comparison.confidence)
    check_unused(_use(comparison), certification_units(samples), comparison.output)
    if comparison.against != START:
        if not any(each.beside for each in requirements):
            raise RequirementError(
                f"--against {comparison.against}: no requirement compares with a predecessor. "
                'Write one, as "lost(NAME) <= 0.02".'
            )
        model_files(comparison.against)
    if measure:
        with alone_in(comparison.output):
            _predecessor(comparison, bounds_of(cli.model))


def _requirements(comparison: Comparison) -> list[Requirement]:
    return [Requirement.parse(text) for text in comparison.requirements]


def _predecessor(comparison: Comparison, bounds: Bounds) -> DataFrame | None:
    """What the predecessor measures on both splits, kept in a file; None if nothing asks for it."""
    paired = [each for each in _requirements(comparison) if each.beside]
    if not paired:
        return None
    path, weights = comparison.output / "predecessor.parquet", None
    of: dict[str, Any] = {"name": _name_of_old(comparison), "run": comparison.runs[0].digest}
    if comparison.against != START:
        weights = model_files(comparison.against) / CHECKPOINT
        of["written"] = weights.stat().st_mtime_ns
    if path.is_file() and (known := read_parquet(path)).attrs["of"] == of:
        return known
    cli = _built_predecessor(comparison, weights)
    require_same_bounds({"The new models": bounds, comparison.against: bounds_of(cli.model)})
    notes_of(cli.model).confidential = True
    samples = samples_by(cli, weights, selection=True)
    for requirement in paired:
        known_from(samples).subject(requirement)
    if on_first_rank():
        samples.attrs["of"] = of
        samples.to_parquet(path, index=False)
    del cli
    gc.collect()  # The next model is loaded.
    torch.cuda.empty_cache()
    return samples


def _built_predecessor(comparison: Comparison, weights: Path | None) -> PointwiseCLI:
    """Builds the predecessor with the comparison's data, of its classes or this package's."""
    words = comparison.runs[0].arguments
    if weights is not None:
        PointwiseCLI(words, run=False, build=False)  # The comparison's classes are known from here.
        model = {"model": own_classes_only(weights.parent / "config.yaml")["model"]}
        # Every argument, instead of the run's.
        words = [*words, "--config", yaml.safe_dump(model)]
    return PointwiseCLI.of_data([], words)


def _name_of_old(comparison: Comparison) -> str | None:
    if not any(each.beside for each in _requirements(comparison)):
        return None
    if comparison.against != START:
        return str(Path(comparison.against).absolute())
    return f"the model of {comparison.runs[0].title} before training"


def answer_requirements(comparison: Comparison) -> Answer | None:
    """Chooses, writes the answer, exports; None until all runs are done: the split opens once."""
    runs, output, first = comparison.runs, comparison.output, on_first_rank()
    open_runs = [run.title for run in runs if not run.finished]
    if open_runs:
        print(
            f"No answer yet: {len(open_runs)} of {len(runs)} runs failed or were not run "
            f"({', '.join(open_runs[:3])}). Mend them or take them out, and run the command again."
        )
        return None
    bounds = {run.title: (run.result() or {})["bounds"] for run in runs}
    require_same_bounds(bounds)
    before = _predecessor(comparison, bounds[runs[0].title])
    requirements = _requirements(comparison)
    measured = [_measured(run, before, requirements) for run in runs]
    _require_same_samples(measured)
    use, units = _use(comparison), certification_units(measured[0].samples)
    check_unused(use, units, output)
    model = _replaceable(output)
    found = choose_model(measured, requirements, comparison.confidence, _name_of_old(comparison))
    if found.chosen is None:
        found.advice = advice(found, comparison, runs[found.nearest()])
    if first:
        remember_use(use, units, output, output)
        _write(found, output)
        print(f"\n{found.statement()}\n")
        if model.exists():
            shutil.rmtree(model)  # Of an earlier answer, which this one replaces.
    if found.chosen is not None:
        with tempfile.TemporaryDirectory(prefix="export-", dir=output) as folder:
            exported = Path(folder) / model.name
            export(runs[found.chosen], found, exported)
            if first:  # Complete: what dies in the middle leaves no model that looks like one.
                exported.replace(model)
    if first:
        more = "" if found.chosen is None else ", model/ with the certificate"
        print(f"Written to {output}: answer.md{more}")
    return found


def _replaceable(output: Path) -> Path:
    """Returns the folder of the chosen model: empty, or of an earlier answer."""
    model = output / "model"
    if model.exists() and not is_certified(model):
        raise RequirementError(
            f"{model}: no comparison has written what is there. Move it, or take another --output."
        )
    return model


def _measured(
    run: Run, before: DataFrame | None, requirements: Sequence[Requirement]
) -> MeasuredModel:
    samples = read_parquet(run.folder / SAMPLES)
    objective = samples.attrs["objective"]
    if SELECTION not in objective:
        raise RequirementError(f"{run.title}: there is no objective on the selection split.")
    if before is not None:
        samples = beside(samples, before, requirements)
    return MeasuredModel(run.title, samples, objective)


def _require_same_samples(measured: Sequence[MeasuredModel]) -> None:
    first = measured[0]
    for other in measured:
        if set(other.samples["unit"]) != set(first.samples["unit"]):
            raise RequirementError(
                f"{first.name} and {other.name} were evaluated on different samples: what is held "
                "out must not depend on method or seed."
            )


def _use(comparison: Comparison) -> dict[str, Any]:
    """What certification samples are used for: the same use twice gives the same answer."""
    old = _name_of_old(comparison)
    return {
        **({} if old is None else {"against": old}),
        "requirements": sorted(comparison.requirements),
        "confidence": comparison.confidence,
        "runs": sorted(run.digest for run in comparison.runs),
    }


def _write(found: Answer, output: Path) -> None:
    note = (
        "Order: in which the models were tested; – for one that another beats in p-value and "
        "objective on the selection split. Each share: selection · certification. Bound: an upper "
        "bound that holds for all models together. p: of the certification split, the largest "
        "over the requirements."
    )
    table = Table("Models", note, found.table()).markdown()
    text = f"# Answer\n\n{found.statement()}\n\n{table}"
    (output / "answer.md").write_text(text, encoding="utf-8")
    (output / "answer.json").write_text(json.dumps(found.as_dict(), indent=1), encoding="utf-8")


def export(run: Run, found: Answer, folder: Path) -> None:
    """Exports the model of a run with its certificate, from the file that was certified."""
    cli = PointwiseCLI.of_data([], run.arguments)
    cli.trainer.limit_test_batches, cli.trainer.callbacks = 0, []  # type: ignore[attr-defined]
    path = run.folder / CHECKPOINT
    cli.trainer.test(cli.model, cli.datamodule, ckpt_path=path, weights_only=True, verbose=False)
    if not cli.trainer.is_global_zero:
        return
    notes_of(cli.model).certificate = found.statement()
    tested = torch.load(run.folder / TESTED, weights_only=True)
    for stage, by_constraint in tested.items():
        cli.model.evaluated[stage] = {n: SampleViolations(**v) for n, v in by_constraint.items()}
    if type(cli.model).export is not PointwiseModule.export:
        cli.model.export(folder)
    else:
        kind = type(cli.model).__name__
        print(f"{kind} has no export(): model/ holds its checkpoint and the certificate alone.")
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    inside = write_certificate(folder, found.as_dict(), config)
    for name in (SAMPLES, CHECKPOINT):
        shutil.copy(run.folder / name, inside / name)
