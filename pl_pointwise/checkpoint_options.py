"""What a checkpoint says of its module's arguments, beside what somebody else says of them.

A configuration says what a module is; a checkpoint gives it weights and multipliers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoints import WholeCheckpointIO
from .errors import TrainingError


def hyperparameters(path: str | Path) -> dict[str, Any]:
    """The module's arguments in a checkpoint, by name, and its class as ``_class_path``.

    Raises:
        TrainingError: the file is no whole checkpoint.
    """
    if Path(path).suffix in (".yaml", ".yml"):
        raise TrainingError(
            f"--ckpt_path {path} is a configuration, which --config takes. A checkpoint ends in "
            ".ckpt."
        )
    found = WholeCheckpointIO().load_checkpoint(path, map_location="cpu")
    stored = dict(found.get("hyper_parameters") or {})
    stored.pop("_instantiator", None)
    return stored


def differences(before: Any, now: Any, name: str = "") -> dict[str, tuple[Any, Any]]:
    """Values of nested mappings that are in both and differ, (before, now) by dotted name.

    >>> differences({"a": 1, "b": {"c": 2, "d": 3}}, {"a": 1, "b": {"c": 4}, "e": 5})
    {'b.c': (2, 4)}
    """
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        nested = [
            differences(before[key], now[key], f"{name}.{key}" if name else str(key))
            for key in before
            if key in now
        ]
        return {key: value for each in nested for key, value in each.items()}
    if name.endswith("class_path"):  # One class has several: pl_pointwise.Pointwise and longer.
        same = str(before).rpartition(".")[2] == str(now).rpartition(".")[2]
    elif isinstance(before, Tensor) and isinstance(now, Tensor):
        same = torch.equal(before, now)
    else:
        same = bool(before == now)
    return {} if same else {name: (before, now)}
