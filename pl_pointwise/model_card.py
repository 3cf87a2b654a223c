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
from typing import TYPE_CHECKING

import torch
from huggingface_hub import ModelCard, ModelCardData
from torch import Tensor

from .certificates import certify
from .manual_optimization import ManualOptimization
from .metrics import quantiles, violation_statistics

if TYPE_CHECKING:
    from .module import PointwiseModule

DEFAULT_OPTIMIZERS = ManualOptimization.configure_optimizers
NOT_HELD_OUT = "train"
STATISTICS = ("mean", "max", "violated", "cvar95")
NONE_YET = (
    "No held-out data were evaluated before the export. Let the fit validate, or export after "
    '`test` with `ModelExport(after="test")`.'
)


def write_card(
    module: PointwiseModule,
    folder: Path,
    *,
    library_name: str,
    pipeline_tag: str,
    base_model: str,
    usage: str,
) -> Path:
    """Writes ``README.md`` into the folder of an export, in place of any that is there.

    library_name, pipeline_tag: the hub's names for what loads the folder and what it does.
    base_model: what was fine-tuned, as the task was told.
    usage: Python that loads the folder.
    """
    name = public_name(base_model)
    data = ModelCardData(
        base_model=name,
        library_name=library_name,
        pipeline_tag=pipeline_tag,
        tags=["pl-pointwise", "constrained-fine-tuning"],
    )
    start = f"Fine-tuned from `{name}`" if name else "Fine-tuned"
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {type(module).__name__.removesuffix('Module')}, fine-tuned under constraints",
        f"{start} with pl-pointwise {version('pl-pointwise')}: an average objective, subject to "
        "requirements on its outputs. A violation is how far a requirement is missed; ≤ 0 is "
        "satisfied.",
        f"```python\n{usage.strip()}\n```",
        "## Requirements",
        *_requirements(module),
        "## Multipliers",
        *_multipliers(module),
        "## Held-out violations",
        *(list(_held_out(module)) or [NONE_YET]),
        "## Training",
        _training(module),
    ]
    path = folder / "README.md"
    ModelCard("\n\n".join(parts) + "\n").save(path)
    return path


def public_name(model: str) -> str | None:
    """A model's name on the hub; None for what is a folder here, or comes with a package."""
    looks_public = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model)
    return model if looks_public and not Path(model).exists() else None


def _requirements(module: PointwiseModule) -> Iterator[str]:
    rows = []
    for name, constraint in module.constraints.items():
        judged = module.evaluation_constraints[name]
        formulation = module.formulations.get(name)
        enforced = f"`{formulation!r}`" if formulation is not None else "nothing"
        rows.append([name, _bounds(constraint), _bounds(judged), enforced])
    yield _table(["constraint", "in training", "in evaluation", "enforced by"], rows)


def _bounds(constraint: object) -> str:
    bounds = {"≥": getattr(constraint, "at_least", None), "≤": getattr(constraint, "at_most", None)}
    return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds.items() if bound is not None)


def _multipliers(module: PointwiseModule) -> Iterator[str]:
    """λ in figures: one number, or the distribution over the training set."""
    rows = []
    for name, table in module.multipliers.items():
        values = table.detach().double().flatten()
        if table.dim() < 2:
            rows.append([name, "one per constraint", *[""] * 3, _list(values)])
        elif len(values):
            active = (values > 0).double().mean()
            spread = quantiles(values, torch.tensor([0.5, 0.9, 1.0], dtype=values.dtype))
            shape = f"{table.shape[0]:,} samples × {table.shape[1]}"
            rows.append([name, shape, *_cells(active, *spread)])
    if rows:
        header = ["constraint", "λ", "share above 0", "median", "90th percentile", "largest"]
        yield _table(header, rows)
    else:
        yield "None: no constraint was enforced with multipliers."


def _held_out(module: PointwiseModule) -> Iterator[str]:
    """Statistics and a certificate for every data set evaluated but the training set."""
    for stage, by_constraint in module.evaluated.items():
        if stage == NOT_HELD_OUT:
            continue
        rows, statements = [], []
        for name, found in by_constraint.items():
            pooled = violation_statistics(found.pooled())
            rows.append([name, *_cells(*(pooled[key] for key in STATISTICS))])
            try:
                statement = certify(found.worst()).statement()
            except ValueError as error:
                statement = f"No certificate: {error}"
            statements.append(f"**{name}**, by the worst element of each sample. {statement}")
        yield f"### {stage}"
        yield _table(["constraint", *STATISTICS], rows)
        metrics = _other_metrics(module, stage)
        if metrics:
            yield f"Of the same pass: {metrics}."
        yield from statements
        if stage.startswith("val"):
            yield (
                "These are validation data, of the last pass before the export. If they chose the "
                "checkpoint or a hyper-parameter, the statement does not hold."
            )


def _other_metrics(module: PointwiseModule, stage: str) -> str:
    """The objective and the task's own metrics of the last pass over a data set."""
    logged = module._trainer.callback_metrics if module._trainer is not None else {}
    found = {
        name.removeprefix(f"{stage}/"): value
        for name, value in logged.items()
        if re.fullmatch(f"{re.escape(stage)}/[^/]+", name)
    }
    return ", ".join(f"{name} {float(value):.4g}" for name, value in found.items())


def _training(module: PointwiseModule) -> str:
    trainer = module._trainer
    facts = {
        "training samples": f"{module.multipliers.samples:,}" if module.multipliers.samples else "",
        "primal steps per dual step": str(module.primal_steps),
        "order of the updates": module.order,
    }
    if trainer is not None:
        optimizers = ", ".join(sorted({type(each).__name__ for each in trainer.optimizers}))
        facts |= {
            "epochs": str(trainer.current_epoch),
            "steps": str(trainer.global_step),
            "processes": str(trainer.world_size),
            "precision": str(trainer.precision),
            "optimizer": optimizers,
        }
    replaced = "configure_optimizers" in vars(module)  # By --optimizer on the command line.
    if not replaced and type(module).configure_optimizers is DEFAULT_OPTIMIZERS:
        facts["optimization"] = f"`{module.optimization!r}`"
    facts |= {
        "seed": os.environ.get("PL_GLOBAL_SEED", ""),
        "samples left out, not finite": str(module.left_out),
        "steps skipped": str(module.skipped_steps),
        "versions": f"torch {torch.__version__}, lightning {version('lightning')}",
    }
    return "\n".join(f"- {name}: {fact}" for name, fact in facts.items() if fact)


def _cells(*values: Tensor) -> list[str]:
    return [f"{float(value):.3g}" for value in values]


def _list(values: Tensor) -> str:
    return ", ".join(_cells(*values))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
