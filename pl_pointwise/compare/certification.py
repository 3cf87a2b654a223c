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

import torch
from lightning.pytorch import Trainer
from pandas import DataFrame, concat, read_parquet

from pl_pointwise.cli import PointwiseCLI
from pl_pointwise.command_line.next_steps import exports
from pl_pointwise.data import TRAIN, dataset_of
from pl_pointwise.errors import DataError
from pl_pointwise.evaluation import MeanBySample, loaders_by_name
from pl_pointwise.lagrangian.terms import carries
from pl_pointwise.module import PointwiseModule
from pl_pointwise.printing import escaped
from pl_pointwise.requirements import Requirement, RequirementError
from pl_pointwise.requirements.answer import Answer, MeasuredModel, choose_model
from pl_pointwise.requirements.exported import (
    CHECKPOINT,
    SAMPLES,
    read_certificate,
    samples_by,
    write_certificate,
)
from pl_pointwise.requirements.samples import (
    CERTIFICATION,
    COLUMNS,
    SELECTION,
    TRAINING,
    Source,
    beside,
    lines_about,
    records_not_known,
    require_known,
    units_in,
)
from pl_pointwise.requirements.uses import check_unused, id_of, remember_use
from pl_pointwise.task import notes_of
from pl_pointwise.training.stepper import micro_batches_of

from .runner import on_first_rank
from .runs import Comparison, Run

TO_SET_UP_DATA: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "limit_val_batches": 0,
    "limit_test_batches": 0,
    "logger": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
}


def check_requirements(comparison: Comparison, cli: PointwiseCLI) -> None:
    """Refuses what cannot come to a certificate, before training.

    cli: built of the first run's arguments.
    """
    _is_there(comparison.output / "model")
    first, trainer, data = comparison.runs[0], Trainer(**TO_SET_UP_DATA), cli.datamodule
    trainer.validate(cli.model, data, verbose=False)
    trainer.test(cli.model, data, verbose=False)
    samples, sources = samples_to_come(cli.model, data or cli.model)
    check_splits(samples, comparison.required, comparison.confidence)
    contents = {f"{name} data": source.content for name, source in sources.items()}
    check_unused(_use(comparison, contents), units_in(samples), comparison.output)
    ran_on = (first.result() or {}).get("data", contents)
    if changed := [name for name in contents if contents[name] != ran_on.get(name, contents[name])]:
        raise RequirementError(
            f"{' and '.join(changed)}: not what {first.title} was made with, though the options "
            "are the same. Put it back, or take another --output."
        )


def samples_to_come(module: PointwiseModule, data: Any) -> tuple[DataFrame, dict[str, Source]]:
    """The table of samples.py before any forward pass, with the training data, and its data sets.

    Values are NaN, and metrics of every sample.

    data: the data module, or the module itself, after the set-up of ``validate`` and ``test``.
    """
    loaders: dict[str, Any] = {}
    for stage in ("val", "test"):
        loaders |= loaders_by_name(stage, getattr(data, f"{stage}_dataloader")())
    loaders.pop(TRAIN.key, None)
    sources = {name: Source(name, dataset_of(loader)) for name, loader in loaders.items()}
    metrics = [n for n, m in module.evaluation_metrics().items() if isinstance(m, MeanBySample)]
    parts = []
    for dataset, loader in loaders.items():
        carried: dict[tuple[str, str], list[torch.Tensor]] = {}
        for micro in (micro for batch in loader for micro in micro_batches_of(module, batch)):
            real = micro.index >= 0
            masks = {("metric", name): real for name in metrics}
            for name in module.evaluation_constraints:
                masks["constraint", name] = carries(micro.masks[name]).cpu() & real
            for key, mask in masks.items():
                carried.setdefault(key, []).append(micro.index[mask])
        for (kind, name), found in carried.items():
            index = torch.cat(found)
            values = torch.full_like(index, torch.nan, dtype=torch.float64)
            parts.append(sources[dataset].lines(kind, name, index, values))
    if TRAIN.key in (known := getattr(data, "datasets", {})):
        sources[TRAIN.key] = Source(TRAIN.key, known[TRAIN.key])
        parts.append(sources[TRAIN.key].training_lines())
    samples = concat(parts, ignore_index=True) if parts else DataFrame(columns=COLUMNS)
    return samples, sources


def check_splits(
    samples: DataFrame, requirements: Sequence[Requirement], confidence: float
) -> None:
    """Refuses splits that overlap or are missing, what there is not, and too few samples."""
    for split in (SELECTION, CERTIFICATION):
        if not units_in(samples, split):
            raise RequirementError(
                f"There is no {split} split. Hold out validation data to choose by and test data "
                "to certify with."
            )
    require_separate_splits(samples)
    samples = samples.assign(before=torch.nan)  # Nothing is measured.
    require_known(samples, requirements)
    for each in requirements:
        n = lines_about(samples, each, CERTIFICATION)["unit"].nunique()
        needed = each.fewest_samples(confidence)
        if n < needed:
            of = f" of category {each.category}" if each.category else ""
            raise RequirementError(
                f"{each.text!r}: certifying this at {100 * confidence:g} % takes at "
                f"least {needed:,} independent samples, all of them satisfied (or equal to the "
                f"predecessor's), and the certification split has {n:,}{of}. Hold out more, "
                "require less, or lower --confidence."
            )


def require_separate_splits(samples: DataFrame) -> None:
    """Refuses units that stand in two splits of a table; those of the training data among them."""
    for one, other in combinations((TRAINING, SELECTION, CERTIFICATION), 2):
        of_other = samples[samples["split"] == other]
        if both := records_not_known(of_other, units_in(samples, one))[1]:
            raise RequirementError(
                f"The {one} and the {other} split share {both:,} of "
                f"{of_other['unit'].nunique():,} units (prompts, queries or records). Take what "
                "stands in both out of one (test_fraction, or a test file)."
            )


def _predecessor(comparison: Comparison) -> str | None:
    """What requirements compare with, if any does."""
    paired = any(each.beside for each in comparison.required)
    return f"the model of {comparison.runs[0].title} before training" if paired else None


def answer_requirements(comparison: Comparison) -> Answer | None:
    """Chooses, exports, writes the answer; None until all runs are done: the split opens once."""
    runs, output = comparison.runs, comparison.output
    results = {run.title: run.result() or {"error": ""} for run in runs}
    open_runs = [title for title, result in results.items() if "error" in result]
    if open_runs:
        print(
            f"No answer yet: {len(open_runs)} of {len(runs)} runs failed or were not run "
            f"({', '.join(open_runs[:3])}). Mend them or take them out, and run the command again."
        )
        return None
    before = None
    if _predecessor(comparison) is not None:
        start = PointwiseCLI.of_data([], runs[0].arguments)
        notes_of(start.model).confidential = True
        before = samples_by(start, None, selection=True)
    measured = [_measured(run, before, comparison.required) for run in runs]
    units = units_in(measured[0].samples)
    for other in measured:
        if {*other.samples["unit"]} != {*measured[0].samples["unit"]}:
            raise RequirementError(
                f"{measured[0].name} and {other.name} were evaluated on different samples: what is "
                "held out must not depend on method or seed."
            )
    weights = sorted(result["wrote"][CHECKPOINT] for result in results.values())
    use = {**_use(comparison, results[runs[0].title]["data"]), "weights": weights}
    check_unused(use, units, output)
    there = _is_there(output / "model", id_of(use, units))
    told = comparison.required, comparison.confidence, _predecessor(comparison)
    found = choose_model(measured, *told)
    if on_first_rank():
        remember_use(use, units, output, output)  # Before anything of the split is shown.
    if found.chosen is not None and not there:
        _export(runs[found.chosen], found, output, id_of(use, units))
    if on_first_rank():
        _write(found, output)
    return found


def _measured(
    run: Run, before: DataFrame | None, requirements: Sequence[Requirement]
) -> MeasuredModel:
    samples = read_parquet(run.folder / SAMPLES)
    objective = samples.attrs["objective"]
    if SELECTION not in objective:
        raise RequirementError(f"{run.title}: there is no objective on the selection split.")
    require_separate_splits(samples)
    samples = samples[samples["split"] != TRAINING]
    if before is not None:
        samples = beside(samples, before, requirements)
    return MeasuredModel(run.title, samples, objective)


def _use(comparison: Comparison, contents: Mapping[str, str]) -> dict[str, Any]:
    """What certification samples are used for: the same use twice gives the same answer.

    contents: of the first run's data sets; those of other runs are in their weights.
    """
    return {
        "requirements": sorted(comparison.requirements),
        "confidence": comparison.confidence,
        "against": _predecessor(comparison),
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
        if use in (None, read_certificate(model)[0].get("use")):
            return True
    of = "no comparison has written what is there" if use is None else "it is not of this answer"
    raise RequirementError(f"{model}: {of}. Move it, or take another --output.")


def _write(found: Answer, output: Path) -> None:
    text = f"# Answer\n\n{escaped(found.statement())}\n"
    (output / "answer.md").write_text(text, encoding="utf-8")
    (output / "answer.json").write_text(json.dumps(found.as_dict(), indent=1), encoding="utf-8")
    more = "" if found.chosen is None else ", and the certified model is in model/"
    print(f"\n{found.statement()}\n\nWritten to {output}: answer.md{more}")


def _export(run: Run, found: Answer, output: Path, use: str) -> None:
    """Exports the model of a run as ``model/``, whole or not at all, from its certified file."""
    try:
        cli = PointwiseCLI.of_data([], run.arguments)
        trainer: Any = cli.trainer
        trainer.limit_test_batches, trainer.callbacks = 0, []
        read: Any = {"ckpt_path": run.folder / CHECKPOINT, "weights_only": True, "verbose": False}
        trainer.test(cli.model, cli.datamodule, **read)
        if not trainer.is_global_zero:
            return
        notes_of(cli.model).certificate = escaped(found.statement())
        with tempfile.TemporaryDirectory(prefix="export-", dir=output) as part:
            folder = Path(part) / "model"
            if exports(type(cli.model)):
                cli.model.export(folder)
            else:
                kind = type(cli.model).__name__
                print(f"{kind} has no export(): model/ holds its checkpoint and certificate alone.")
            write_certificate(folder, {**found.as_dict(), "use": use}, run.folder)
            folder.replace(output / "model")
    except Exception as error:
        raise RequirementError(
            f"{run.title} is certified, but its export failed, so there is no new model/ or "
            f"answer: {type(error).__name__}: {error}. Mend that, and run the same command again: "
            "it comes to the same answer."
        ) from error
