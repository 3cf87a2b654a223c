"""Packaged configurations by name.

In a task's folder ``configs/``, ``reranker`` is ``base.yaml`` and ``reranker/demo`` the variant
``demo.yaml``. A method such as ``reranker/penalty`` is the file ``penalty.yaml`` that all tasks
share, in tasks/common/configs/methods, with what the task's ``methods.yaml`` says under its name
over it: other numbers, or a method of this task alone. Sets of methods for a comparison are in
``compare/``, and ``--methods`` looks there first.

A name stands for its parts: paths, and YAML in place of a path, which the parser takes too.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from .errors import DataError

T = TypeVar("T")

OPTIONS = ("--config", "-c")


def packaged_configs() -> dict[str, list[str]]:
    """Returns the parts of what ``--config`` finds by name: bases, variants and methods."""
    return _bases() | _variants() | _methods()


def packaged_comparisons() -> dict[str, Path]:
    """Returns what ``--methods`` finds by name: sets of methods."""
    return {
        f"{name}/{path.stem}": path
        for name, folder in _tasks().items()
        for path in sorted(folder.glob("compare/*.yaml"))
    }


def overview() -> str:
    """Returns the names by kind, one line per task, for the help of the commands."""
    lines = ["packaged configurations", "", "  base (--config NAME):", f"    {', '.join(_tasks())}"]
    for title, names in (
        ("variants (--config TASK/NAME)", _variants()),
        ("methods (--config TASK/NAME)", _methods()),
        ("comparisons (compare --methods TASK/NAME)", packaged_comparisons()),
    ):
        split = [name.split("/") for name in names]
        tasks = {task: [short for of, short in split if of == task] for task, _ in split}
        lines += [f"  {title}:"] if tasks else []
        lines += [f"    {task + ':':<13}{', '.join(found)}" for task, found in tasks.items()]
    return "\n".join(lines)


def config_parts(name: str) -> list[str]:
    """Returns the parts behind a name; a file, or YAML in place of one, stands for itself.

    A file of the working directory comes before a packaged name.

    Raises:
        FileNotFoundError: there is neither.
        DataError: a file that is not YAML, or no mapping.
    """
    if is_text(name):
        return [name]
    if not os.path.isfile(name):
        return _packaged(name, packaged_configs())
    read_mapping(name)
    return [name]


def comparison_path(name: str) -> str:
    """Returns the path of a set of methods, by its packaged name or as it is.

    Raises:
        FileNotFoundError: there is neither.
    """
    return name if os.path.isfile(name) else str(_packaged(name, packaged_comparisons()))


def is_text(part: str) -> bool:
    """Whether a part of a configuration is YAML and no path."""
    return "\n" in part or "{" in part


def text_of(part: str) -> str:
    """Returns the YAML of a part."""
    return part if is_text(part) else Path(part).read_text(encoding="utf-8")


def read_mapping(path: str) -> dict[str, Any]:
    """
    Raises:
        DataError: the file is not YAML, or maps no names to values.
    """
    try:
        read = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(read, dict) or not read:
        what = "empty" if not read else f"a {type(read).__name__}"
        raise DataError(f"{path} is {what}, and has to map names to values.")
    return read


def meant_file(path: str) -> str:
    """Returns " Did you mean …?" with a file of the same folder, or ""."""
    folder = Path(path).parent
    return nearest(path, map(str, folder.iterdir()) if folder.is_dir() else ())


def missing_base(args: Sequence[str]) -> str:
    """Returns what to write where a command line has no configuration, or no base of one."""
    given = configurations(args)
    if not given and not any(word.startswith("--model") for word in args):
        return " Give a configuration: --config TASK."
    for name in given:
        task = name.partition("/")[0]
        if name != task and name in packaged_configs() and task not in given:
            return f" {name} goes on top of its base: --config {task} --config {name}."
    return ""


def configurations(args: Sequence[str]) -> list[str]:
    """Returns the values of ``--config`` on a command line.

    >>> configurations(["fit", "--config", "safety", "--config=safety/paper", "-c", "own.yaml"])
    ['safety', 'safety/paper', 'own.yaml']
    """
    found = []
    for position, word in enumerate(args):
        option, equals, value = word.partition("=")
        if option in OPTIONS:
            found += [value] if equals else list(args[position + 1 : position + 2])
    return found


def with_config_parts(args: Any) -> Any:
    """Returns a command line with the parts in place of names; else what it was given."""
    if not isinstance(args, Sequence) or isinstance(args, str):
        return args
    resolved = list[str]()
    words = iter(args)
    for word in words:
        option, equals, value = word.partition("=")
        if option not in OPTIONS:
            resolved.append(word)
            continue
        name = value if equals else next(words, None)
        if name is None:
            resolved.append(word)  # The parser says that its value is missing.
        else:
            resolved += [each for part in config_parts(name) for each in (option, part)]
    return resolved


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns " Did you mean …?" with the known word that is most like ``word``, or "".

    >>> nearest("compar", ["fit", "compare"]), nearest("xyz", ["fit"])
    (" Did you mean 'compare'?", '')
    """
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _packaged(name: str, packaged: Mapping[str, T]) -> T:
    if name in packaged:
        return packaged[name]
    near = meant_file(name) or nearest(name, packaged)
    raise FileNotFoundError(
        f"No configuration {name!r}: neither a file nor a packaged one.{near} pl-pointwise --help "
        "lists them."
    )


def _tasks() -> dict[str, Path]:
    """Returns the folder of configurations of every task."""
    return {
        path.parts[-3]: path.parent
        for folder in importlib.import_module("pl_pointwise.tasks").__path__
        for path in sorted(Path(folder).glob("*/configs/base.yaml"))
    }


def _bases() -> dict[str, list[str]]:
    return {name: [str(folder / "base.yaml")] for name, folder in _tasks().items()}


def _variants() -> dict[str, list[str]]:
    return {
        f"{name}/{path.stem}": [str(path)]
        for name, folder in _tasks().items()
        for path in sorted(folder.glob("*.yaml"))
        if path.stem not in ("base", "methods")
    }


@functools.cache  # Every command line reads them, for its help.
def _methods() -> dict[str, list[str]]:
    found = dict[str, list[str]]()
    for task, folder in _tasks().items():
        shared = (folder.parents[1] / "common/configs/methods").glob("*.yaml")
        methods = {path.stem: [str(path)] for path in sorted(shared)}
        own = folder / "methods.yaml"
        for name, overlay in yaml.safe_load(own.read_text()).items() if own.is_file() else ():
            methods.setdefault(name, []).append(yaml.safe_dump(overlay, sort_keys=False))
        found |= {f"{task}/{name}": parts for name, parts in methods.items()}
    return found
