"""``pl-pointwise compare … --require``: from finished runs to one model with its certificate.

The output folder then holds, beside the tables of the selection split,

    answer.md, answer.json   the statement, every model's figures; the same for programs
    answer.png               objective against what is required, with bounds
    certification.json       the units the certification split had, and what they were used for
    model/                   the chosen model, exported, with its certificate in the card
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure
from pandas import DataFrame

from pl_pointwise.cli import PointwiseCLI
from pl_pointwise.data import units_of
from pl_pointwise.module import PointwiseModule
from pl_pointwise.requirements import Requirement, RequirementError
from pl_pointwise.requirements.answer import Answer, MeasuredModel, answer
from pl_pointwise.requirements.beforehand import check, held_out_loaders, samples_to_come
from pl_pointwise.requirements.monitor import CERTIFICATE, config_for_new_records
from pl_pointwise.requirements.samples import (
    CERTIFICATION,
    SELECTION,
    hash_of,
    read_samples,
    samples_of,
    write_samples,
)

from .drawing import save
from .runner import HIDDEN, bounds_of, datasets_of, quieten
from .runs import CHECKPOINT, SAMPLES, Comparison, Run
from .tables import Table

ONE_PROCESS = ["--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.num_nodes", "1"]
ONE_PROCESS += ["--trainer.strategy", "auto", "--trainer.logger", "false"]

USED = "certification.json"
"""The file that says what certification samples were used for."""

AGREEMENT = 1e-3
"""By how much a violation of the model read from its file may differ from what was measured."""


def check_before(comparison: Comparison, bounds: Mapping[str, dict[str, str]]) -> None:
    """Refuses a requirement that cannot come to a certificate, before anything is trained.

    Loads the first method's data, and makes no forward pass.

    bounds: by method, of :func:`~.checks.check_methods`, which has built their models.

    Raises:
        RequirementError: see :func:`~pl_pointwise.requirements.beforehand.check`; methods judged
            by different bounds; or certification samples that were used for another choice.
    """
    requirements = [Requirement.parse(text) for text in comparison.requirements]
    quieten()
    cli = PointwiseCLI([*comparison.runs[0].arguments, *ONE_PROCESS], run=False)
    cli.trainer.limit_val_batches = cli.trainer.limit_test_batches = 0  # To set up the data only.
    cli.trainer.validate(cli.model, cli.datamodule, verbose=False)
    cli.trainer.test(cli.model, cli.datamodule, verbose=False)
    datasets = datasets_of(cli)
    samples = samples_to_come(cli.model, held_out_loaders(cli.datamodule), datasets)
    trained = units_of(datasets["train"]) if "train" in datasets else None
    check(samples, [hash_of(unit) for unit in trained or ()], requirements, comparison.confidence)
    _check_unused(comparison, samples)
    expected = bounds_of(cli.model)
    runs = {run.method: run for run in reversed(comparison.runs)}
    for method, found in bounds.items():
        if found != expected:
            raise _other_bounds(comparison.runs[0], runs[method], expected, found)


def _other_bounds(
    one: Run, other: Run, expected: dict[str, str], found: dict[str, str]
) -> RequirementError:
    return RequirementError(
        f"{one.title} and {other.title} are judged by different bounds, {expected} and {found}. "
        "Give all methods the same evaluation tolerance; the one they are trained with may differ."
    )


def give_answer(comparison: Comparison) -> Answer | None:
    """Chooses among the finished runs, writes the answer, and exports the chosen model.

    Returns: None while a run has failed or was not run: the certification split is opened once,
        for all of them.

    Raises:
        RequirementError: runs that were not judged alike, or certification samples that were used
            for another choice.
    """
    runs = comparison.runs
    open_runs = [run.title for run in runs if not run.finished]
    if open_runs:
        print(
            f"No answer yet: {len(open_runs)} of {len(runs)} runs failed or were not run "
            f"({', '.join(open_runs[:3])}). The certification split is opened once, for all runs: "
            "mend them or take them out of the comparison, and run the same command again."
        )
        return None
    measured = [_measured(run) for run in runs]
    _check_alike(runs)
    _check_unused(comparison, measured[0].samples)
    requirements = [Requirement.parse(text) for text in comparison.requirements]
    found = answer(measured, requirements, comparison.confidence)
    output = comparison.output
    _remember_use(comparison, measured[0].samples)
    _write(found, output)
    print(f"\n{found.statement()}\n")
    model = output / "model"
    if model.exists():
        shutil.rmtree(model)  # Of an earlier answer, which this one replaces.
    if found.chosen is not None:
        export(runs[found.chosen], found, model)
        print(f"Written to {output}: answer.md, answer.png, model/ with the certificate")
    else:
        print(f"Written to {output}: answer.md, answer.png")
    return found


def _measured(run: Run) -> MeasuredModel:
    result = run.result()
    assert result is not None
    objective = result["objective"]
    if SELECTION not in objective:
        raise RequirementError(f"{run.title}: there is no objective on the selection split.")
    training = {
        name.split("/")[1]: value
        for name, value in result["metrics"].items()
        if name.startswith("train/") and name.endswith("/violated")
    }
    samples = read_samples(run.folder / SAMPLES)
    return MeasuredModel(run.title, samples, objective, result["constrained"], training)


def _check_alike(runs: Sequence[Run]) -> None:
    """
    Raises:
        RequirementError: two runs measured violations by different bounds, or other samples.
    """
    first = runs[0].result() or {}
    units = set(read_samples(runs[0].folder / SAMPLES)["unit"])
    for run in runs[1:]:
        result = run.result() or {}
        if result["bounds"] != first["bounds"]:
            raise _other_bounds(runs[0], run, first["bounds"], result["bounds"])
        if set(read_samples(run.folder / SAMPLES)["unit"]) != units:
            raise RequirementError(
                f"{runs[0].title} and {run.title} were judged on different samples. What is held "
                "out must not depend on the method or the seed."
            )


# The certification split is used once -----------------------------------------------------------


def _use(comparison: Comparison) -> dict[str, Any]:
    """What certification samples are used for: the same use twice gives the same answer."""
    return {
        "requirements": sorted(comparison.requirements),
        "confidence": comparison.confidence,
        "runs": sorted(run.digest for run in comparison.runs),
    }


def _check_unused(comparison: Comparison, samples: DataFrame) -> None:
    path = comparison.output / USED
    if not path.is_file():
        return
    units = set(samples[samples["split"] == CERTIFICATION]["unit"])
    for earlier in json.loads(path.read_text()):
        both = units.intersection(earlier["units"])
        if both and earlier["use"] != _use(comparison):
            raise RequirementError(
                f"{len(both):,} of {len(units):,} certification units in this folder were used "
                "for another choice before: requirements "
                f"{', '.join(earlier['use']['requirements'])} among {len(earlier['use']['runs'])} "
                f"models (see {path}). What they showed may have led to this one, so it would "
                "certify nothing. Certify on new samples (another test file or data.seed, and "
                "train anew), or repeat that choice as it was."
            )


def _remember_use(comparison: Comparison, samples: DataFrame) -> None:
    path = comparison.output / USED
    uses = json.loads(path.read_text()) if path.is_file() else []
    units = sorted(set(samples[samples["split"] == CERTIFICATION]["unit"]))
    use = {"use": _use(comparison), "units": units}
    if use not in uses:
        path.write_text(json.dumps([*uses, use], indent=1))


# What is written --------------------------------------------------------------------------------


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
    draw(found, output / "answer.png")


def draw(found: Answer, path: Path) -> None:
    """Writes a panel per requirement: what was seen and its bound against the objective."""
    count = len(found.subjects)
    figure = Figure(figsize=(0.6 + 4.6 * count, 3.9), layout="constrained")
    panels = figure.subplots(1, count, squeeze=False)[0]
    for number, (panel, requirement) in enumerate(zip(panels, found.requirements, strict=True)):
        for position, tested in enumerate(found.selection.tested):
            finding = found.findings[position][number]
            x = tested.candidate.objective
            passed = "fixed sequence" in tested.certified
            shade = "#009E73" if passed else "#0072B2" if tested.place is not None else "#BBBBBB"
            panel.plot([x, x], [finding.share, finding.bound], color=shade, linewidth=1.2)
            marker = "*" if position == found.chosen else "o"
            size = 190 if marker == "*" else 36
            panel.scatter(x, finding.share, s=size, color=shade, marker=marker, zorder=3)
        panel.axhline(requirement.at_most, color="black", linewidth=1)
        panel.set_title(requirement.text, fontsize="medium")
        panel.set_xlabel("objective, selection split (lower is better)")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("mean loss on the certification split")
    handles = [
        panels[0].scatter([], [], color=shade, label=label, marker=marker, s=size)
        for shade, label, marker, size in (
            ("#009E73", "chosen", "*", 150),
            ("#009E73", "certified", "o", 36),
            ("#0072B2", "tested, not certified", "o", 36),
            ("#BBBBBB", "not in the sequence", "o", 36),
        )
    ]
    columns = 4 if count > 1 else 2
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
    figure.suptitle("Line: up to the bound that holds for all models together", fontsize="small")
    save(figure, path)


# The chosen model -------------------------------------------------------------------------------


def export(run: Run, found: Answer, folder: Path) -> None:
    """Exports the model of a run with its certificate, as it is read from the run's file.

    The model is tested once more on the certification split, so that what is exported is what was
    certified.

    Raises:
        RequirementError: it measures something else.
    """
    cli = PointwiseCLI([*run.arguments, "--trainer.logger", "false"], run=False)
    cli.model.certificate = found.statement()
    path = run.folder / CHECKPOINT
    cli.trainer.test(cli.model, cli.datamodule, ckpt_path=path, weights_only=True, verbose=False)
    if not cli.trainer.is_global_zero:
        return
    measured = samples_of(cli.model, datasets_of(cli))
    _check_same(found.models[found.chosen or 0].samples, measured)
    inside = folder / CERTIFICATE
    if type(cli.model).export is not PointwiseModule.export:
        cli.model.export(folder)
    else:
        kind = type(cli.model).__name__
        print(f"{kind} has no export(): {folder} holds its checkpoint and the certificate alone.")
    inside.mkdir(parents=True)
    (inside / "certificate.json").write_text(json.dumps(found.as_dict(), indent=1))
    certified = measured[measured["split"] == CERTIFICATION]
    write_samples(certified, inside / SAMPLES)
    config = config_for_new_records(yaml.safe_load((run.folder / "config.yaml").read_text()))
    (inside / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    shutil.copy(path, inside / CHECKPOINT)


def _check_same(before: DataFrame, now: DataFrame) -> None:
    keys = ["dataset", "kind", "quantity", "index"]
    before = before[before["dataset"].isin(HIDDEN) & (before["kind"] == "constraint")]
    both = before.merge(now, on=keys, suffixes=("", " now"))
    difference = (both["value"] - both["value now"]).abs()
    scale = 1 + both["value"].abs()
    if len(both) != len(before) or (difference > AGREEMENT * scale).any():
        raise RequirementError(
            f"The model read from its file measures other violations than it did when it was "
            f"trained, by up to {difference.max():.3g}. It is not exported: the certificate is "
            "not about it. Do data or forward pass draw random numbers in evaluation?"
        )
