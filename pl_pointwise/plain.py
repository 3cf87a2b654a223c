"""Plain values, as YAML and checkpoints hold them, and the objects behind them."""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from inspect import isabstract
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import numpy as np
import torch

from .constraint import Constraint
from .formulations import Formulation
from .lagrangian.terms import OBJECTIVE, require_names


class NotPlainError(TypeError):
    """A value without a plain form."""


def plain(value: Any) -> Any:
    """``value`` as plain data, to load weights-only; NotPlainError where that cannot be.

    Formulations become ``{class_path, init_args}``, dataclasses dicts, paths strings, arrays lists.
    """
    if value is None or type(value) in (bool, int, float, str, torch.dtype):
        return value
    if isinstance(value, Formulation):
        return plain(value.config())
    if is_dataclass(value) and not isinstance(value, type):
        return plain({field.name: getattr(value, field.name) for field in fields(value)})
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
    if isinstance(value, (int, float)):
        return float(value) if isinstance(value, float) else int(value)
    raise NotPlainError(f"{type(value).__module__}.{type(value).__qualname__}")


def plain_arguments(arguments: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Constructor arguments that have a plain form, and of the others the type, by name."""
    kept, left_out = dict[str, Any](), dict[str, str]()
    given = vars(arguments) if isinstance(arguments, Namespace) else arguments
    for name, value in given.items():
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
    nested = {f.name: hints[f.name] for f in fields(kind) if is_dataclass(hints[f.name])}  # type: ignore[arg-type]
    return kind(**{k: from_plain(nested[k], v) if k in nested else v for k, v in value.items()})


def formulation_from(config: Formulation | Mapping[str, Any] | None) -> Formulation | None:
    """The formulation behind ``{class_path, init_args}``; no other class is built."""
    if config is None or isinstance(config, Formulation):
        return config
    path = config.get("class_path") if isinstance(config, Mapping) else None
    if not isinstance(path, str):
        raise ValueError(
            f"Not a formulation: {config!r}. Give an object such as Pointwise(alpha=1.0), a dict "
            "of them by constraint, or None; in YAML {class_path, init_args}."
        )
    # One that is defined within a function or a class is found by its name alone.
    own = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in _subclasses(Formulation)}
    kind = known_class(path) or own.get(path)
    if kind is None or not issubclass(kind, Formulation) or isabstract(kind):
        raise ValueError(
            f"Unknown formulation class {path!r}: write pl_pointwise.formulations.Pointwise, for "
            "one; of your own import the module first."
        )
    built: Formulation = kind(**dict(config.get("init_args") or {}))
    return built


def _subclasses(kind: Any) -> list[type[Formulation]]:
    return [each for child in kind.__subclasses__() for each in [child, *_subclasses(child)]]


def known_class(path: str) -> type | None:
    """Returns the model, data or formulation of a name, if it ships or is loaded already."""
    from lightning.pytorch import LightningDataModule, LightningModule  # PointwiseLoss needs none.

    module, _, name = path.rpartition(".")
    if module.partition(".")[0] == __name__.partition(".")[0]:
        with suppress(ImportError):
            importlib.import_module(module)
    found = getattr(sys.modules.get(module), name, None)
    kinds = (LightningModule, LightningDataModule, Formulation)
    if not (isinstance(found, type) and issubclass(found, kinds)):
        return None
    return None if found.__module__.startswith(("lightning.", "pytorch_lightning.")) else found


def formulations_from(
    formulation: Formulation | Mapping[str, Any] | None, constraints: Mapping[str, Constraint]
) -> dict[str, Formulation]:
    """The formulation of every constraint by name; empty for plain training."""
    if formulation is None:
        return {}
    if not isinstance(formulation, Mapping) or "class_path" in formulation:
        formulation = dict.fromkeys(constraints, formulation)
    require_names("formulation", formulation, constraints)
    built = {name: formulation_from(config) for name, config in formulation.items()}
    return {
        name: one if constraints[name].equals is None else one.for_equality()
        for name, one in built.items()
        if one is not None
    }


def declared_constraints(
    constraints: Mapping[str, Any], evaluation_constraints: Mapping[str, Any] | None
) -> tuple[dict[str, Constraint], dict[str, Constraint]]:
    """The constraints of training and of evaluation by name, also from their plain form."""
    built = []
    for given in (constraints, evaluation_constraints or {}):
        if not isinstance(given, Mapping):
            raise ValueError(
                f"constraints={given!r}: give a dict of constraints by name, such as "
                '{"fit": Constraint(at_most=0.1)}.'
            )
        built.append({str(name): from_plain(Constraint, of) for name, of in given.items()})
    training, evaluation = built
    if wrong := [name for name in training if name == OBJECTIVE or "/" in name]:
        raise ValueError(f"{wrong[0]!r}: name a constraint without a slash, and not {OBJECTIVE!r}.")
    require_names("evaluation_constraints", evaluation, training, partial=True)
    return training, {**training, **evaluation}
