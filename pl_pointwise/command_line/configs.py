"""Configurations: packaged ones by name, and what a stranger's would import or read.

In a task's folder ``configs/``, ``reranker`` is ``base.yaml`` and ``reranker/demo`` the variant
``demo.yaml``. A method such as ``reranker/penalty`` is the file ``penalty.yaml`` that all tasks
share, in tasks/common/configs/methods, with what the task's ``methods.yaml`` says under its name
over it: other numbers, or a method of this task alone. Sets of methods for a comparison are in
``compare/``, and ``--methods`` looks there first.

A name stands for its parts: paths, and YAML instead of a path, which the parser takes too. In a
stranger's almost any argument may be a class's name, YAML in a text, or the path of another file.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from ..errors import DataError, printable
from ..lagrangian.declared import known_class

OPTIONS = ("--config", "-c")
PACKAGE = __name__.partition(".")[0]
LONGEST = 100_000  # Bytes of a stranger's; configurations of runs have some thousands.


@functools.cache  # Every command line reads them, for its help.
def by_kind() -> dict[str, dict[str, list[str]]]:
    """Returns what is packaged, by kind and name its parts."""
    packaged: dict[str, dict[str, list[str]]] = {
        "base": {},
        "variants": {},
        "methods": {},
        "comparisons": {},
    }
    for root in map(Path, importlib.import_module("pl_pointwise.tasks").__path__):
        shared = sorted(root.glob("common/configs/methods/*.yaml"))
        for base in sorted(root.glob("*/configs/base.yaml")):
            folder = base.parent
            task = base.parts[-3]
            packaged["base"][task] = [str(base)]
            for path in sorted(folder.glob("*.yaml")):
                if path.stem not in ("base", "methods"):
                    packaged["variants"][f"{task}/{path.stem}"] = [str(path)]
            packaged["methods"] |= _methods_of(task, folder, shared)
            for path in sorted(folder.glob("compare/*.yaml")):
                packaged["comparisons"][f"{task}/{path.stem}"] = [str(path)]
    return packaged


def _methods_of(
    task: str, folder: Path, shared: Iterable[Path]
) -> dict[str, list[str]]:
    """The methods of a task: those that all share, with the task's own words over them."""
    methods = {f"{task}/{path.stem}": [str(path)] for path in shared}
    overlays = folder / "methods.yaml"
    if overlays.is_file():
        for name, overlay in yaml.safe_load(overlays.read_text()).items():
            text = yaml.safe_dump(overlay, sort_keys=False)
            methods.setdefault(f"{task}/{name}", []).append(text)
    return methods


def packaged_configs() -> dict[str, list[str]]:
    """Returns the parts of what ``--config`` finds by name: bases, variants and methods."""
    packaged = by_kind()
    return packaged["base"] | packaged["variants"] | packaged["methods"]


def packaged_comparisons() -> dict[str, Path]:
    """Returns what ``--methods`` finds by name: sets of methods."""
    return {name: Path(path) for name, (path,) in by_kind()["comparisons"].items()}


def overview() -> str:
    """Returns the names by kind, one line per task, for the help of the commands."""
    packaged = by_kind()
    lines = ["packaged configurations", "", "  base (--config NAME):"]
    lines.append(f"    {', '.join(packaged['base'])}")
    options = {
        "variants": "--config",
        "methods": "--config",
        "comparisons": "compare --methods",
    }
    for kind, option in options.items():
        lines.append(f"  {kind} ({option} TASK/NAME):")
        for task, names in groupby(packaged[kind], lambda name: name.partition("/")[0]):
            short = ", ".join(name.partition("/")[2] for name in names)
            lines.append(f"    {task + ':':<13}{short}")
    return "\n".join(lines)


def config_parts(name: str) -> list[str]:
    """Returns the parts behind a name; a file, which comes first, or YAML stands for itself."""
    if is_text(name):
        return [name]
    if name.endswith(".py"):
        raise DataError(
            f"--config {name}: it is Python, and a configuration is YAML. Write a file that names "
            f"its class, model: {{class_path: {Path(name).stem}.YOUR_MODULE}}, and give that one."
        )
    if not os.path.isfile(name):
        return packaged_configs().get(name) or _not_found(name)
    read_mapping(name)
    return [name]


def comparison_path(name: str) -> str:
    """Returns the path of a set of methods, which is given by packaged name or as a path."""
    if os.path.isfile(name):
        return name
    return str(packaged_comparisons().get(name) or _not_found(name))


def is_text(part: str) -> bool:
    """Whether a part of a configuration is YAML and no path."""
    return "\n" in part or "{" in part


def text_of(part: str) -> str:
    """Returns the YAML of a part."""
    return part if is_text(part) else Path(part).read_text(encoding="utf-8")


class DistinctLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping, of which YAML's takes the last in silence."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set[str]()
        for key, _ in node.value:
            if str(key.value) in seen and key.tag != "tag:yaml.org,2002:merge":
                line = key.start_mark.line + 1
                raise yaml.YAMLError(
                    f"line {line}: {key.value!r} stands twice in a mapping."
                )
            seen.add(str(key.value))
        return node


def read_mapping(
    path: str | Path, loader: type[yaml.SafeLoader] = DistinctLoader
) -> Any:
    """Returns what a YAML file maps names to."""
    try:
        content = yaml.load(Path(path).read_bytes(), loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as YAML: {printable(error)}") from error
    if not isinstance(content, dict) or not content:
        kind = f"a {type(content).__name__}" if content else "empty"
        raise DataError(f"{path} is {kind}, and has to map names to values.")
    return content


def with_config_parts(args: Iterable[str]) -> list[str]:
    """Returns a command line with the parts instead of names."""
    words = list[str]()
    names = list[str]()
    rest = iter(args)
    for word in rest:
        option, equals, name = word.partition("=")
        if option not in OPTIONS:
            words.append(word)
            continue
        if not equals:  # The name is the next word.
            name = next(rest, "")
        if not name:  # Missing, which the parser says.
            words.append(word)
            continue
        names.append(name)
        for part in config_parts(name):
            words += [option, part]
    require_order(names)
    return words


def require_order(names: Sequence[str]) -> None:
    """Refuses a variant or method without its base, or a file, in front of it."""
    known = packaged_configs()
    for number, name in enumerate(names):
        task = name.partition("/")[0]
        before = names[:number]
        if name not in known or name == task or task in before:
            continue
        # A file in front of it may be the base.
        if task in names or known.keys() >= {*before}:
            raise DataError(
                f"{name} goes behind its base: --config {task} --config {name}."
            )


def _not_found(name: str) -> Any:
    near = get_close_matches(name, [*packaged_configs(), *packaged_comparisons()], 1)
    hint = f"Did you mean {near[0]!r}?" if near else "pl-pointwise --help lists them."
    raise FileNotFoundError(
        f"No configuration {name!r}: neither a file nor a packaged one. {hint}"
    )


# A stranger's -------------------------------------------------------------------------------------


class _PlainLoader(DistinctLoader):
    def compose_node(self, *where: Any) -> Any:
        """Refuses aliases: a few lines of them may stand for billions of values."""
        if (
            self.check_event(yaml.AliasEvent)
            and self.peek_event().anchor in self.anchors
        ):
            raise DataError("it has an alias (*), which no export writes.")
        return super().compose_node(*where)


def read_foreign(path: Path) -> dict[str, Any]:
    """Returns what a stranger's configuration maps names to; DataError where that is unreadable."""
    if path.stat().st_size > LONGEST:
        raise DataError(f"{path} has more than {LONGEST:,} bytes. Export again.")
    content: dict[str, Any] = read_mapping(path, _PlainLoader)
    return content


def foreign_names(value: Any) -> Iterator[str]:
    """What a parser would import or follow, anywhere in a plain value; nothing of it is done.

    Classes and dotted names of what is installed, but not models, data and formulations that this
    package ships or that are loaded already; and names of files and addresses.
    """
    if isinstance(value, Mapping):
        if "class_path" in value and not known_class(str(value["class_path"])):
            yield str(value["class_path"])
        value = [*value, *value.values()]
    if isinstance(value, (list, tuple, set)):
        for entry in value:
            yield from foreign_names(entry)
    elif isinstance(value, str):
        yield from _foreign_names_in(value)


def _foreign_names_in(text: str) -> Iterator[str]:
    for name in re.findall(r"[^\W\d]\w*(?:\.\w+)+", text):
        # A dotted name of nothing that is installed cannot be imported: a version number, say.
        first = name.partition(".")[0]
        if (first in sys.modules or find_spec(first)) and not known_class(name):
            yield name
    if _is_elsewhere(text):
        yield text
    try:
        inner = yaml.load(text, _PlainLoader)
    except (DataError, RecursionError):
        yield text
    except (yaml.YAMLError, ValueError):
        pass  # A text for the parser too.
    else:
        # A text that is YAML of another value may be read once more by the parser.
        if inner != text:
            yield from foreign_names(inner)


def _is_elsewhere(text: str) -> bool:
    """Whether a parser may read it as the name of a file, or of one at an address."""
    if re.match(r"\s*[\w+.-]*(::|://)", text):
        return True
    with suppress(OSError, ValueError):  # Too long, or with a NUL.
        path = os.path.expanduser(text.strip())
        return os.path.exists(path) and not os.path.isdir(path)
    return False
