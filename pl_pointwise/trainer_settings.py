"""What a ``Trainer`` may be given and multipliers per sample cannot be trained with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .data import IndexedDataset
from .errors import TrainingError
from .lagrangian.trained import STATIC_GRAPH

ONLINE = ("GRPOTrainer", "RLOOTrainer", "PPOTrainer", "OnlineDPOTrainer")
"""Trainers that make their samples themselves."""


def refuse_arguments(
    kind: type, args: Sequence[Any], options: Mapping[str, Any]
) -> None:
    """Refuses, before anything is built, what would fail in step 1 or train something else."""
    online = [base.__name__ for base in kind.__mro__ if base.__name__ in ONLINE]
    if online:
        raise TrainingError(
            f"{online[0]} makes its samples itself and computes its own loss, so no sample keeps a "
            "multiplier. Take PointwiseLoss in a loop of your own, with samples=None."
        )
    settings = options.get("args", args[1] if len(args) > 1 else None)
    for name in ("packing", "padding_free"):
        if getattr(settings, name, False):
            raise TrainingError(
                f"{name}=True puts several examples in a row, and every sample needs its own, as "
                f"it has its own multiplier. Set {name}=False."
            )
    if getattr(settings, "ddp_static_graph", False):
        raise TrainingError(STATIC_GRAPH)
    if isinstance(options.get("train_dataset"), Mapping):
        raise TrainingError(SEVERAL_SETS)
    if getattr(settings, "label_smoothing_factor", 0):
        raise TrainingError(
            "label_smoothing_factor is not used here: the loss is that of terms(). Leave it out, "
            "and smooth the labels there."
        )
    if options.get("compute_loss_func") is not None:
        raise TrainingError(
            "compute_loss_func is not called here: the loss is that of terms(). Leave it out."
        )


def refuse_sharding(trainer: Any) -> None:
    """Refuses weights of which no rank has the gradient of one term."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    first = trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) != 2
    if trainer.is_deepspeed_enabled or first:
        raise TrainingError(
            "Sharded weights: DeepSpeed and FSDP1 hide the gradient of one term. Take FSDP2: "
            'fsdp_config={"version": 2}.'
        )
    if getattr(trainer.args, "ddp_static_graph", False):
        raise TrainingError(STATIC_GRAPH)


SEVERAL_SETS = (
    "train_dataset holds several data sets, and a multiplier belongs to a position in one. "
    "Join them: datasets.concatenate_datasets([*train_dataset.values()])."
)


def refuse_order(kind: type) -> None:
    """Refuses a class that names the trainer before the mix-in, which then changes nothing."""
    names = [base.__name__ for base in kind.__mro__]
    if "Trainer" in names[: names.index("PointwiseTrainerMixin")]:
        raise TrainingError(
            f"{kind.__name__} names its trainer before the mix-in, whose methods are then not "
            f"called: class {kind.__name__}(PointwiseTrainerMixin, …)."
        )


def with_index(rows: Any) -> Any:
    """A data set whose rows have ``index``, their position."""
    if isinstance(rows, Mapping):  # Given by its place among the arguments.
        raise TrainingError(SEVERAL_SETS)
    if isinstance(rows, IndexedDataset):
        return rows
    custom = getattr(rows, "format", {}) if hasattr(rows, "column_names") else {}
    if not hasattr(rows, "add_column") or custom.get("type") == "custom":
        return IndexedDataset(rows)  # A transform of its own gives its own columns.
    if "index" in rows.column_names:
        raise TrainingError(
            'train_dataset has a column "index", which is the position: rename it.'
        )
    return rows.add_column("index", list(range(len(rows))))
