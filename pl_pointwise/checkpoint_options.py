"""What a checkpoint says of its module's arguments, beside what somebody else says of them.

A configuration says what a module is; a checkpoint gives it weights and multipliers.
"""

from __future__ import annotations

import inspect
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


def settings_of(kind: type, path: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for ``load_from_checkpoint``; a field of one of the module's settings goes there.

    ``model_name=…`` of a module with an argument ``policy``, say, becomes the checkpoint's policy
    with that name.

    Raises:
        TypeError: neither an argument of the class nor a field of one in the checkpoint.
    """
    parameters = inspect.signature(kind).parameters
    foreign = [name for name in given if name not in parameters]
    if not foreign or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(given)
    stored = hyperparameters(path)
    arguments = {name: value for name, value in given.items() if name in parameters}
    for name in foreign:
        owners = [
            owner
            for owner, fields in stored.items()
            if owner in parameters and isinstance(fields, Mapping) and name in fields
        ]
        if len(owners) != 1 or owners[0] in given:
            raise TypeError(
                f"{kind.__name__} has no argument {name!r}"
                f"{f' beside {owners[0]}, which was given' if len(owners) == 1 else ''}. It takes "
                f"{', '.join(list(parameters))}."
            )
        (owner,) = owners
        arguments[owner] = {**arguments.get(owner, stored[owner]), name: given[name]}
    return arguments
