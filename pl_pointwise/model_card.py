"""The model card of an export: what was required, how it was trained, what held-out data show.

``README.md`` in the folder, with the hub's metadata on top. It names no folder of this machine: a
base model that is a folder stays without a name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .certificates import certify
from .extras import needs
from .metrics import quantiles
from .task import notes_of

if TYPE_CHECKING:
    from .module import PointwiseModule
    from .task import Constraint

TEMPLATE = Path(__file__).parent / "templates/model_card.md.jinja"
NOT_HELD_OUT = "train"
STATISTICS = {
    "mean": "mean",
    "max": "max",
    "violated_samples": "share of samples violated",
    "violated": "of values",
    "cvar95": "CVaR95 of values",
}
NONE_YET = (
    'None: what wrote this folder evaluated nothing. With `ModelExport(after="test")` among its '
    "callbacks, a test exports the model with its results."
)


def write_card(
    module: PointwiseModule,
    folder: Path,
    *,
    library_name: str,
    pipeline_tag: str,
    base_model: str | None,
    usage: str,
) -> Path:
    """Writes ``README.md`` into the folder of an export, in place of any that is there.

    library_name, pipeline_tag: the hub's names for what loads the folder and what it does.
    base_model: what was fine-tuned, as the task was told; None where nothing was.
    usage: Python that loads the folder.
    """
    with needs("language", "A model card"):
        from huggingface_hub import ModelCard, ModelCardData
    name = type(module).__name__.removesuffix("Module")
    data = ModelCardData(
        base_model=public_name(base_model),
        library_name=library_name,
        pipeline_tag=pipeline_tag,
        tags=["pl-pointwise", "constrained-fine-tuning"],
        model_name=name,
        **notes_of(module).facts,
    )
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=name,
        version=version("pl-pointwise"),
        usage=usage.strip(),
        requirements=_requirements(module),
        multipliers=list(_multipliers(module)),
        statistics=[*STATISTICS.values()],
        certificate=notes_of(module).certificate,
        held_out=[_held_out(module, stage) for stage in module.evaluated if stage != NOT_HELD_OUT],
        none_yet=NONE_YET,
        training=_training(module),
    )
    path = folder / "README.md"
    card.save(path)
    return path


def card_facts(
    license: str | None = None, language: Sequence[str] = (), datasets: Sequence[str] = ()
) -> dict[str, Any]:
    """What only the user knows, as the hub's metadata has it; what is not given is left out."""
    given = {"license": license, "language": list(language), "datasets": list(datasets)}
    return {name: value for name, value in given.items() if value}


def public_name(model: str | None) -> str | None:
    """Returns a model's name on the hub; None for a folder, or what comes with a package."""
    looks_public = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model or "")
    return model if model and looks_public and not Path(model).exists() else None


def _requirements(module: PointwiseModule) -> list[list[str]]:
    """Returns a line per constraint: its bounds in training and in evaluation, and its method."""
    lines = []
    for name, constraint in module.constraints.items():
        formulation = module.formulations.get(name)
        enforced = f"`{formulation!r}`" if formulation is not None else "nothing"
        bounds = [_bounds(each) for each in (constraint, module.evaluation_constraints[name])]
        lines.append([name, *bounds, enforced])
    return lines


def _bounds(constraint: Constraint) -> str:
    bounds = {"=": constraint.equals, "≥": constraint.at_least, "≤": constraint.at_most}
    return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds.items() if bound is not None)


def _multipliers(module: PointwiseModule) -> Iterator[list[str]]:
    """Yields λ by constraint: one number, or how many are not 0, and how large those are.

    Not of all: which samples never carry the constraint, the table does not know.
    """
    for name, table in module.multipliers.items():
        values = table.detach().double().flatten()
        if table.dim() < 2:
            yield [name, "one per constraint", "", "", "", ", ".join(_cells(*values))]
        elif len(values):
            sizes = values[values != 0].abs()
            spread = _cells(*quantiles(sizes, [0.5, 0.9, 1.0])) if len(sizes) else ["", "", ""]
            shape = f"{table.shape[0]:,} samples × {table.shape[1]}"
            yield [name, shape, f"{len(sizes):,}", *spread]


def _held_out(module: PointwiseModule, stage: str) -> dict[str, Any]:
    """Returns statistics and a certificate of one data set, for the template."""
    lines, statements = [], []
    for name, found in module.evaluated[stage].items():
        known = found.statistics()
        if "violated_samples" not in known:  # A value each.
            known["violated_samples"] = known.pop("violated")
        cells = [_cells(known[key])[0] if key in known else "" for key in STATISTICS]
        lines.append([name, *cells])
        if notes_of(module).certificate is not None:
            continue  # It says what holds, the choice of the model included.
        try:
            statements.append((name, certify(found.worst()).statement()))
        except ValueError as error:
            statements.append((name, f"No certificate: {error}"))
    metrics = _other_metrics(module, stage)
    return {"stage": stage, "lines": lines, "metrics": metrics, "statements": statements}


def _other_metrics(module: PointwiseModule, stage: str) -> str:
    """Returns the objective and the task's own metrics of the last pass over a data set."""
    logged = module._trainer.callback_metrics if module._trainer is not None else {}
    found = {
        name.removeprefix(f"{stage}/"): value
        for name, value in logged.items()
        if re.fullmatch(f"{re.escape(stage)}/[^/]+", name)
    }
    return ", ".join(f"{name} {float(value):.4g}" for name, value in found.items())


def _training(module: PointwiseModule) -> dict[str, str]:
    """Returns what the training was, by name; a fact that is not known is empty."""
    trainer = module._trainer
    facts = {
        "training samples": f"{module.multipliers.samples:,}" if module.multipliers.samples else "",
        "primal steps per dual step": str(module.training_settings.primal_steps),
        "order of the updates": module.training_settings.order,
    }
    if trainer is None or not trainer.global_step:  # Of a test, say, and not of the training.
        facts["steps"] = str(module._run.steps_of_checkpoint or "")
    else:
        optimizers = [
            f"{type(each).__name__}, learning rate {each.defaults['lr']:g}"
            for each in trainer.optimizers
        ]
        facts |= {
            "epochs": str(trainer.current_epoch),
            "steps": str(trainer.global_step),
            "processes": str(trainer.world_size),
            "precision": str(trainer.precision),
            "optimizer": "; ".join(optimizers),
        }
    facts |= {
        "weights of the checkpoint": notes_of(module).checkpoint,
        "seed": os.environ.get("PL_GLOBAL_SEED", ""),
        "samples left out, not finite": str(module._run.stepper.left_out),
        "steps skipped": str(module._run.stepper.skipped_steps),
        "versions": f"torch {torch.__version__}, lightning {version('lightning')}",
    }
    return facts


def _cells(*values: Tensor) -> list[str]:
    return [f"{float(value):.3g}" for value in values]
