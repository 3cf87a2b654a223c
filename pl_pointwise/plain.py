"""Plain values, as YAML and checkpoints hold them, and the dataclasses behind them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import numpy as np
import torch


class NotPlainError(TypeError):
    """A value without a plain form."""


class Configured(ABC):
    """What says its plain form itself, as ``{class_path, init_args}``."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The plain form."""


def plain(value: Any) -> Any:
    """``value`` as plain data, to load weights-only; NotPlainError where that cannot be.

    Formulations become ``{class_path, init_args}``, dataclasses dicts, paths strings, arrays lists.
    """
    if value is None or type(value) in (bool, int, float, str, torch.dtype):
        return value
    if isinstance(value, Configured):
        return plain(value.config())
    if is_dataclass(value) and not isinstance(value, type):
        return plain(
            {field.name: getattr(value, field.name) for field in fields(value)}
        )
    if isinstance(value, (Mapping, Namespace)):
        entries = vars(value) if isinstance(value, Namespace) else value
        return {str(key): plain(entry) for key, entry in entries.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(entry) for entry in value]
    if isinstance(value, (np.generic, np.ndarray)):
        return plain(value.tolist())
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return value.detach().cpu().clone() if value.ndim else value.item()
    if isinstance(value, Enum) and isinstance(value, (str, int, float)):
        return plain(value.value)
    if isinstance(value, (Path, str, torch.device)):
        return str(value)
    # A subclass of a number, as numpy's float64 is: the weights-only loader refuses its class.
    if isinstance(value, (int, float)):
        return float(value) if isinstance(value, float) else int(value)
    raise NotPlainError(f"{type(value).__module__}.{type(value).__qualname__}")


def plain_arguments(arguments: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Constructor arguments that have a plain form, and of the others the type, by name."""
    kept = dict[str, Any]()
    left_out = dict[str, str]()
    values = vars(arguments) if isinstance(arguments, Namespace) else arguments
    for name, value in values.items():
        try:
            kept[name] = plain(value)
        except NotPlainError as error:
            left_out[name] = str(error)
    return kept, left_out


Settings = TypeVar("Settings")


def from_plain(kind: type[Settings], value: Settings | Mapping[str, Any]) -> Settings:
    """The dataclass behind its plain form, nested ones included; objects pass through."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r} is no {kind.__name__}: write {kind.__name__}(…).")
    hints = get_type_hints(kind)
    arguments = dict(value)
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name in arguments and is_dataclass(hints[field.name]):
            nested: Any = hints[field.name]
            arguments[field.name] = from_plain(nested, arguments[field.name])
    return kind(**arguments)
