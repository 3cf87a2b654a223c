"""The model card of an export: what was required, how it was trained, what held-out data show.

``README.md`` in the folder, with the hub's metadata on top. It names no folder of this machine: a
base model that is a folder stays without a name.
"""

from __future__ import annotations

import os
import re
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .certificates import certify
from .extras import needs
from .task import history_of, notes_of

if TYPE_CHECKING:
    from .evaluation import SampleViolations
    from .module import PointwiseModule

TEMPLATE = Path(__file__).parent / "templates/model_card.md.jinja"


def write_card(
    module: PointwiseModule,
    folder: Path,
    *,
    library_name: str,
    pipeline_tag: str,
    base_model: str | None,
    usage: str,
    note: str = "",
) -> Path:
    """Writes ``README.md`` into the folder of an export.

    library_name, pipeline_tag: the hub's names for what loads the folder and what it does.
    base_model: what was fine-tuned, as the task names it; None where nothing was.
    usage: Python that loads the folder.
    note: what a reader must know first, such as that the folder holds a part of a model.
    """
    with needs("language", "A model card"):
        from huggingface_hub import ModelCard, ModelCardData
    name = type(module).__name__.removesuffix("Module")
    facts = {key: fact for key, fact in notes_of(module).facts.items() if fact}
    metadata = ModelCardData(
        base_model=public_name(base_model),
        library_name=library_name,
        pipeline_tag=pipeline_tag,
        tags=["pl-pointwise", "constrained-fine-tuning"],
        model_name=name,
        **facts,
    )
    card = ModelCard.from_template(
        metadata,
        template_path=str(TEMPLATE),
        name=name,
        version=version("pl-pointwise"),
        usage=usage.strip(),
        note=note,
        applied=_applied(module),
        module=module,
        checkpoint=notes_of(module).checkpoint,
        seed=os.environ.get("PL_GLOBAL_SEED", ""),
        versions=f"torch {torch.__version__}, lightning {version('lightning')}",
        # Of the last passes: the objective and the task's own metrics among them.
        logged=module._trainer.callback_metrics if module._trainer is not None else {},
        statement_of=_statement,
        certificate=notes_of(module).certificate,
    )
    path = folder / "README.md"
    card.save(path)
    return path


def public_name(model: str | None) -> str | None:
    """Returns a model's name on the hub; None for a folder, or what comes with a package."""
    looks_public = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model or "")
    return model if model and looks_public and not Path(model).exists() else None


def _applied(module: PointwiseModule) -> list[str]:
    """The constraints that some training sample had; all where that is not known."""
    history = history_of(module)
    history.read()
    names = list(module.constraints)
    # Not known of a run that began at a checkpoint, nor of a stream.
    if not history.steps or history.partial or not history.samples:
        return names
    return [name for name in names if not bool(history.last[name].isnan().all())]


def _statement(violations: SampleViolations) -> str:
    """What held-out violations certify, for the template."""
    try:
        return certify(violations.worst()).statement()
    except ValueError as error:
        return f"No certificate: {error}"
