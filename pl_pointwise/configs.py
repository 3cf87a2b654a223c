"""Packaged configurations by name.

In a task's folder ``configs/``, ``reranker`` is ``base.yaml``, ``reranker/demo`` the variant
``demo.yaml``, ``reranker/pointwise`` the method ``methods/pointwise.yaml``. Sets of methods for a
comparison are in ``compare/``, and ``--methods`` looks there first.
"""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

OPTIONS = ("--config", "-c")


def packaged_configs() -> dict[str, Path]:
    """Returns what ``--config`` finds by name: bases, variants and methods."""
    return _by_name("*.yaml") | _by_name("methods/*.yaml")


def packaged_comparisons() -> dict[str, Path]:
    """Returns what ``--methods`` finds by name: sets of methods."""
    return _by_name("compare/*.yaml")


def overview() -> str:
    """Returns the names by kind, one line per task, for the help of the commands."""
    bases = [name for name in _by_name("*.yaml") if "/" not in name]
    lines = ["packaged configurations", "", "  base (--config NAME):", f"    {', '.join(bases)}"]
    for title, pattern in (
        ("variants (--config TASK/NAME)", "*.yaml"),
        ("methods (--config TASK/NAME)", "methods/*.yaml"),
        ("comparisons (compare --methods TASK/NAME)", "compare/*.yaml"),
    ):
        names = [name.split("/") for name in _by_name(pattern) if "/" in name]
        tasks = {task: [short for of, short in names if of == task] for task, _ in names}
        lines += [f"  {title}:"] if tasks else []
        lines += [f"    {task + ':':<11}{', '.join(found)}" for task, found in tasks.items()]
    return "\n".join(lines)


def config_path(name: str, comparison: bool = False) -> str:
    """Returns the path behind a name; anything that is no packaged name passes through as it is.

    A file of that name in the working directory comes first. YAML in place of a name passes too.

    comparison: look among the sets of methods first.

    Raises:
        FileNotFoundError: ``name`` looks like a packaged one (no file ending) and is none.
    """
    is_yaml = "\n" in name or "{" in name
    if is_yaml or os.path.isfile(name):
        return name
    packaged = packaged_configs() | (packaged_comparisons() if comparison else {})
    if name in packaged:
        return str(packaged[name])
    if not Path(name).suffix and not os.path.exists(name):
        files = [file for file in (f"{name}.yaml", f"{name}.yml") if os.path.isfile(file)]
        raise FileNotFoundError(
            f"No configuration {name!r}: neither a file nor a packaged one."
            f"{nearest(name, files or packaged)} pl-pointwise --help lists them."
        )
    return name


def missing_base(paths: Sequence[str]) -> str:
    """Returns what to write where a task's packaged variant or method stands without its base."""
    for name, path in packaged_configs().items():
        task, _, variant = name.partition("/")
        if variant and str(path) in paths and config_path(task) not in paths:
            return f" {name} goes on top of its base: --config {task} --config {name}."
    return ""


def with_config_paths(args: Any) -> Any:
    """Returns a command line with the names after ``--config`` resolved; else what it was given."""
    if not isinstance(args, Sequence) or isinstance(args, str):
        return args
    resolved = []
    for position, argument in enumerate(args):
        option, equals, value = argument.partition("=")
        if position and args[position - 1] in OPTIONS:
            resolved.append(config_path(argument))
        elif option in OPTIONS and equals:
            resolved.append(f"{option}={config_path(value)}")
        else:
            resolved.append(argument)
    return resolved


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns " Did you mean …?" with the known word that is most like ``word``, or "".

    >>> nearest("compar", ["fit", "compare"]), nearest("xyz", ["fit"])
    (" Did you mean 'compare'?", '')
    """
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _by_name(pattern: str) -> dict[str, Path]:
    """Returns the files of every task's ``configs/`` that fit the pattern."""
    found = {}
    for folder in importlib.import_module("pl_pointwise.tasks").__path__:
        for path in sorted(Path(folder).glob(f"*/configs/{pattern}")):
            task = path.relative_to(folder).parts[0]
            found[task if path.stem == "base" else f"{task}/{path.stem}"] = path
    return found
