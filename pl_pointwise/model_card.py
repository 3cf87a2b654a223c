"""The model card of an export: what was required, how it was trained, what held-out data show.

``README.md`` in the folder, with the hub's metadata on top. It names no folder of this machine: a
base model that is a folder stays without a name.
"""

from __future__ import annotations

import os
import re
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .certificates import certify
from .extras import needs
from .task import notes_of

if TYPE_CHECKING:
    from .module import PointwiseModule

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
        module=module,
        checkpoint=notes_of(module).checkpoint,
        seed=os.environ.get("PL_GLOBAL_SEED", ""),
        versions=f"torch {torch.__version__}, lightning {version('lightning')}",
        statistics=[*STATISTICS.values()],
        certificate=notes_of(module).certificate,
        held_out=[_held_out(module, stage) for stage in module.evaluated if stage != "train"],
    )
    path = folder / "README.md"
    card.save(path)
    return path


def public_name(model: str | None) -> str | None:
    """Returns a model's name on the hub; None for a folder, or what comes with a package."""
    looks_public = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model or "")
    return model if model and looks_public and not Path(model).exists() else None


def _held_out(module: PointwiseModule, stage: str) -> dict[str, Any]:
    """Returns statistics and a certificate of one data set, for the template."""
    lines, statements = [], []
    for name, found in module.evaluated[stage].items():
        known = found.statistics()
        if "violated_samples" not in known:  # A value each.
            known["violated_samples"] = known.pop("violated")
        cells = [f"{float(known[key]):.3g}" if key in known else "" for key in STATISTICS]
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
