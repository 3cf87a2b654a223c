"""Options of a module that come from a checkpoint: ``--ckpt_path`` and ``load_from_checkpoint``.

LightningCLI puts a checkpoint's hyperparameters over the command line. Here the later wins of

    defaults, a task's base configuration (``--config TASK``), the checkpoint,
    other configuration files, options

as a base configuration only says what a task starts with, and the rest was asked for.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
import yaml
from torch import Tensor

from .checkpoints import WholeCheckpointIO
from .configs import OPTIONS, packaged_configs
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


def usable(stored: Mapping[str, Any], kind: type) -> tuple[dict[str, Any], list[str]]:
    """Of a checkpoint's arguments those the class takes from a file, and why not the others."""
    parameters = inspect.signature(kind).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    kept, problems = dict[str, Any](), list[str]()
    hints = _hints(kind)
    for name, value in stored.items():
        foreign = next(foreign_names(value, hints.get(name, Any)), None)
        if foreign is not None:  # Where it was written honestly no function is in it.
            problems.append(f"{name} (it names {foreign}: nothing is imported for a checkpoint)")
            continue
        if name not in parameters and not takes_all:
            problems.append(f"{name} (no option of {kind.__name__} now)")
            continue
        try:
            yaml.safe_dump(value)
        except yaml.YAMLError:
            problems.append(f"{name} (a {type(value).__name__}, which no file can hold)")
        else:
            kept[name] = value
    return kept, problems


def _hints(kind: type) -> dict[str, Any]:
    """The types of a class's arguments, and of those that it hands on to its base classes."""
    found: dict[str, Any] = {}
    for each in reversed(kind.__mro__):
        try:
            found |= get_type_hints(vars(each).get("__init__"))
        except Exception:  # A name that is there for type checkers alone, or no __init__.
            found |= getattr(vars(each).get("__init__"), "__annotations__", {})
    return found


def foreign_names(value: Any, hint: Any) -> Iterator[str]:
    """Names in a plain value that the parser would import for its type: of functions and classes.

    Not those of classes that this package ships or that are loaded already, where the type asks for
    one of their kind.
    """
    alternatives = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        yield from (name for each in alternatives for name in foreign_names(value, each))
    elif value is None or not isinstance(value, (str, Mapping, list, tuple)) or _is_plain(hint):
        return
    elif Any in (hint, *alternatives) or hint in (
        object,
        dict,
        list,
        tuple,
    ):  # A class in it would be built, a text stays one.
        yield from (text for text in _texts(value) if "class_path" in text)
    elif isinstance(get_origin(hint), type) and issubclass(get_origin(hint), Iterable):
        nested = value.values() if isinstance(value, Mapping) else value
        for entry in [value] if isinstance(value, str) else nested:
            yield from (name for each in alternatives for name in foreign_names(entry, each))
    else:
        given: Any = value if isinstance(value, Mapping) else {"class_path": value}
        kind: Any = hint
        arguments = given
        if {"class_path", "init_args"} & set(given):
            kind, arguments = _known_class(given.get("class_path"), hint), given.get("init_args")
        if not isinstance(kind, type):
            yield from (text for text in _texts(value) if "." in text)
            return
        hints = _hints(kind)
        for name, entry in (arguments or {}).items():
            yield from foreign_names(entry, hints.get(name, str))  # An unknown one is refused.


def _is_plain(hint: Any) -> bool:
    """Whether values of a type are texts, numbers or choices of them."""
    if isinstance(hint, str):  # What was written, where its names are not known here.
        return set(re.findall(r"\w+", hint)) <= {"str", "int", "float", "bool", "None", "Optional"}
    plain = (str, int, float, complex, type(None), os.PathLike, Enum)
    return get_origin(hint) is Literal or (isinstance(hint, type) and issubclass(hint, plain))


def _known_class(path: Any, hint: Any) -> type | None:
    """A class of the kind ``hint`` that this package ships, or that is loaded already."""
    module, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    if module.partition(".")[0] == __name__.partition(".")[0]:
        with suppress(ImportError):
            importlib.import_module(module)
    found = getattr(sys.modules.get(module), name, None)
    fits = isinstance(found, type) and isinstance(hint, type) and issubclass(found, hint)
    return found if fits else None


def _texts(value: Any) -> Iterator[str]:
    """All texts in plain values, keys among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for entry in value.items() for text in _texts(entry))
    elif isinstance(value, (list, tuple)):
        yield from (text for entry in value for text in _texts(entry))


class CheckpointConfig:
    """A checkpoint's arguments as a configuration file, and command lines with it.

    Args:
        subcommand: of the command line.
        args: the command line, with the subcommand.
        class_path: of the module.
        arguments: of the module, of plain values.
    """

    def __init__(
        self, subcommand: str, args: Sequence[str], class_path: str, arguments: Mapping[str, Any]
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        file = Path(self._folder.name) / "hyperparameters-of-the-checkpoint.yaml"
        model = {"class_path": class_path, "init_args": dict(arguments)}
        file.write_text(yaml.safe_dump({"model": model}), encoding="utf-8")
        self._config = ["--config", str(file)]
        start = next(
            place
            for place, word in enumerate(args)
            if word == subcommand and (not place or args[place - 1] not in OPTIONS)
        )
        self._start, self._rest = list(args[: start + 1]), list(args[start + 1 :])

    def __enter__(self) -> CheckpointConfig:
        return self

    def __exit__(self, *error: object) -> None:
        self._folder.cleanup()

    def in_its_place(self) -> list[str]:
        """The command line with the checkpoint behind the base configurations, before the rest."""
        bases, others = _base_configurations(self._rest)
        return [*self._start, *bases, *self._config, *others]

    def last(self) -> list[str]:
        """The command line with the checkpoint over all of it."""
        return [*self._start, *self._rest, *self._config]


def _base_configurations(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options ``--config TASK`` of a command line whose names are resolved, and the rest."""
    paths = {
        part for name, parts in packaged_configs().items() if "/" not in name for part in parts
    }
    bases, others = list[str](), list[str]()
    words = iter(args)
    for word in words:
        option, equals, value = word.partition("=")
        both = [word]
        if option in OPTIONS and not equals:
            value = next(words, "")
            both.append(value)
        (bases if option in OPTIONS and value in paths else others).extend(both)
    return bases, others


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


def sources(path: str, before: Mapping[str, tuple[Any, Any]], absent: Iterable[str]) -> list[str]:
    """Lines for the head of config.yaml: which of the model's values are the checkpoint's.

    before: what differs, see :func:`differences`.
    absent: names of arguments that the checkpoint does not hold.
    """
    lines = [f"The values of model are those of the checkpoint {path}"]
    lines += [
        f"  but {key}: {now!r}, in place of its {old!r}" for key, (old, now) in before.items()
    ]
    lines += [f"  but {name}, which it does not hold" for name in absent]
    return lines


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
