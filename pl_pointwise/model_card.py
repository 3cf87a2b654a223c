"""The model card of an export: what was required, how it was trained, what held-out data show.

``README.md`` in the folder, with the hub's metadata on top. It names no folder of this machine: a
base model that is a folder stays without a name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .certificates import certify
from .extras import needs
from .task import notes_of

if TYPE_CHECKING:
    from .module import PointwiseModule
    from .task import Constraint

TEMPLATE = Path(__file__).parent / "templates/model_card.md.jinja"
STATISTICS = {
    "mean": "mean",
    "max": "max",
    "violated_samples": "violation rate of samples",
    "violated": "violation rate of values",
    "cvar95": "CVaR95 of values",
}


def write_card(
    module: PointwiseModule,
    folder: Path,
    *,
    library_name: str,
    pipeline_tag: str,
    base_model: str | None,
    usage: str,
) -> Path:
    """Writes ``README.md`` into the folder of an export.

    library_name, pipeline_tag: the hub's names for what loads the folder and what it does.
    base_model: what was fine-tuned, as the task names it; None where nothing was.
    usage: Python that loads the folder.
    """
    with needs("language", "A model card"):
        from huggingface_hub import ModelCard, ModelCardData
    name = type(module).__name__.removesuffix("Module")
    card = ModelCard.from_template(
        ModelCardData(
            base_model=public_name(base_model),
            library_name=library_name,
            pipeline_tag=pipeline_tag,
            tags=["pl-pointwise", "constrained-fine-tuning"],
            model_name=name,
            **{name: fact for name, fact in notes_of(module).facts.items() if fact},
        ),
        template_path=str(TEMPLATE),
        name=name,
        version=version("pl-pointwise"),
        usage=usage.strip(),
        requirements=list(_requirements(module)),
        statistics=[*STATISTICS.values()],
        certificate=notes_of(module).certificate,
        held_out=[_held_out(module, stage) for stage in module.evaluated if stage != "train"],
        training=_training(module),
    )
    path = folder / "README.md"
    card.save(path)
    return path


def public_name(model: str | None) -> str | None:
    """Returns a model's name on the hub; None for a folder, or what comes with a package."""
    looks_public = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model or "")
    return model if model and looks_public and not Path(model).exists() else None


def _requirements(module: PointwiseModule) -> Iterator[list[str]]:
    """Yields by constraint its bounds in training and in evaluation, and its method."""
    for name, constraint in module.constraints.items():
        enforced = f"`{module.formulations[name]!r}`" if name in module.formulations else "nothing"
        bounds = constraint, module.evaluation_constraints[name]
        yield [name, *map(_bounds, bounds), enforced]


def _bounds(constraint: Constraint) -> str:
    bounds = {"=": constraint.equals, "≥": constraint.at_least, "≤": constraint.at_most}
    return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds.items() if bound is not None)


def _held_out(module: PointwiseModule, stage: str) -> dict[str, Any]:
    """Returns statistics and a certificate of one data set, for the template."""
    lines, statements = [], []
    for name, found in module.evaluated[stage].items():
        known = found.statistics()
        if "violated_samples" not in known:  # A value each.
            known["violated_samples"] = known.pop("violated")
        cells = [_cells(known[key])[0] if key in known else "" for key in STATISTICS]
        lines.append([name, *cells])
        if notes_of(module).certificate is None:  # It says what holds, the choice included.
            try:
                statements.append((name, certify(found.worst()).statement()))
            except ValueError as error:
                statements.append((name, f"No certificate: {error}"))
    # The objective and the task's own metrics of the last pass over these data.
    logged = module._trainer.callback_metrics if module._trainer is not None else {}
    metrics = [
        f"{name.partition('/')[2]} {float(value):.4g}"
        for name, value in logged.items()
        if re.fullmatch(f"{re.escape(stage)}/[^/]+", name)
    ]
    return {"stage": stage, "lines": lines, "metrics": ", ".join(metrics), "statements": statements}


def _training(module: PointwiseModule) -> dict[str, str]:
    """Returns what the training was, by name; a fact that is not known is empty."""
    trainer, samples = module._trainer, module.multipliers.samples
    facts = {
        "training samples": f"{samples:,}" if samples else "",
        "primal steps per dual step": str(module.training_settings.primal_steps),
        "order of the updates": module.training_settings.order,
        "steps": str(module._run.steps_of_checkpoint or ""),
    }
    if trainer is not None and trainer.global_step:  # Not of a test alone.
        facts |= {
            "epochs": str(trainer.current_epoch),
            "steps": str(trainer.global_step),
            "processes": str(trainer.world_size),
            "precision": str(trainer.precision),
            "optimizer": "; ".join(
                f"{type(each).__name__}, learning rate {each.defaults['lr']:g}"
                for each in trainer.optimizers
            ),
        }
    return facts | {
        "weights of the checkpoint": notes_of(module).checkpoint,
        "seed": os.environ.get("PL_GLOBAL_SEED", ""),
        "samples left out, not finite": str(module._run.stepper.left_out),
        "steps skipped": str(module._run.stepper.skipped_steps),
        "versions": f"torch {torch.__version__}, lightning {version('lightning')}",
    }


def _cells(*values: Tensor) -> list[str]:
    return [f"{float(value):.3g}" for value in values]
