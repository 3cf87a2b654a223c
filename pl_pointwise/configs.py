"""Packaged configurations by name: ``reranker`` is a base file, ``reranker/average`` an overlay."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OPTIONS = ("--config", "-c", "--rows")


def packaged_configs() -> dict[str, Path]:
    """Every packaged YAML by name: ``tasks/<task>/configs/base.yaml`` is ``<task>``.

    Of two files of one name, that in ``compare/`` is reached by ``--rows``.
    """
    found: dict[str, Path] = {}
    for folder in importlib.import_module("pl_pointwise.tasks").__path__:
        for path in sorted(Path(folder).glob("*/configs/**/*.yaml")):
            task = path.relative_to(folder).parts[0]
            name = task if path.stem == "base" else f"{task}/{path.stem}"
            if name not in found or found[name].parent.name == "compare":
                found[name] = path
    return found


def config_path(name: str, rows: bool = False) -> str:
    """The path behind a name; anything that is no packaged name passes through as it is.

    A file of that name in the working directory comes first.

    Raises:
        FileNotFoundError: ``name`` looks like a packaged one (no file ending) and is none.
    """
    packaged = packaged_configs()
    if name in packaged and not Path(name).is_file():
        task, _, stem = name.partition("/")
        compared = [path for path in packaged.values() if path.stem == "base"]
        own = [p.parent / "compare" / f"{stem}.yaml" for p in compared if p.parts[-3] == task]
        return str(own[0] if rows and own and own[0].is_file() else packaged[name])
    if not Path(name).suffix and not Path(name).exists() and "{" not in name:
        raise FileNotFoundError(
            f"No configuration {name!r}: neither a file nor one of {', '.join(packaged)}."
        )
    return name


def with_config_paths(args: Any) -> Any:
    """A command line with the names after ``--config`` resolved; other forms pass through."""
    if not isinstance(args, Sequence) or isinstance(args, str):
        return args
    resolved = []
    for position, argument in enumerate(args):
        option, equals, value = argument.partition("=")
        if position and args[position - 1] in OPTIONS:
            resolved.append(config_path(argument, args[position - 1] == "--rows"))
        elif option in OPTIONS and equals:
            resolved.append(f"{option}={config_path(value, option == '--rows')}")
        else:
            resolved.append(argument)
    return resolved
