"""What options, classes and files there are, and which of them a wrong name is most like."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from .configs import is_text, nearest, text_of


def plain(option: str) -> str:
    """An option without the steps that a command line may leave out.

    >>> plain("model.init_args.training.optimization.init_args.lr")
    'model.training.optimization.lr'
    """
    return ".".join(part for part in option.split(".") if part not in ("init_args", "dict_kwargs"))


def meant(name: str, known: Sequence[str]) -> str:
    """Returns the dotted option that is most like ``name``, or "".

    The whole name may be alike, the last step alone (which then has to be the same or nearly so),
    or the first.

    >>> meant("trainer.max_epoks", ["trainer.max_epochs", "trainer.max_time", "model"])
    'trainer.max_epochs'
    >>> meant("lern_rate", ["tolerance", "training.optimization.learning_rate"])
    'training.optimization.learning_rate'
    >>> meant("modle.tolerance", ["trainer", "model"])
    'model.tolerance'
    """
    root, _, rest = name.partition(".")
    roots = {each.partition(".")[0] for each in known}
    if rest and root not in roots:
        begin = close(root, roots)
        return f"{begin}.{rest}" if begin is not None else ""
    beside = [each for each in known if not rest or each.partition(".")[0] == root]
    lasts = {each.rpartition(".")[2]: each for each in reversed(beside)}
    found = close(name, beside)
    if found is None and (end := close(name.rpartition(".")[2], lasts)) is not None:
        found = lasts[end]
    return found or ""


def close(word: str, known: Iterable[str]) -> str | None:
    """Returns the known word that is most like ``word``, if any is."""
    found = re.search(r"'(.*)'", nearest(word, known))
    return found[1] if found else None


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    """Returns the dotted names of a parser's options, fields of dataclasses among them."""
    names = []
    for action in parser._actions:
        if action.dest not in (argparse.SUPPRESS, "help"):
            names.append(plain(action.dest))
            names += _fields(getattr(action, "_typehint", None), plain(action.dest))
    return list(dict.fromkeys(names))


def _fields(hint: Any, name: str, depth: int = 3) -> list[str]:
    found = []
    for kind in (hint, *get_args(hint)):
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and depth:
            for each in dataclasses.fields(kind):
                below = f"{name}.{each.name}"
                found += [below, *_fields(_hints(kind).get(each.name), below, depth - 1)]
    return found


def _hints(kind: type) -> dict[str, Any]:
    try:
        return get_type_hints(kind)
    except (NameError, TypeError):  # A name for type checkers only.
        return {}


def meant_file(path: str) -> str:
    """Returns " Did you mean …?" with a file of the same folder, or ""."""
    folder = Path(path).parent
    there = [str(each) for each in folder.iterdir()] if folder.is_dir() else []
    return nearest(path, [each.removeprefix("./") for each in there])


def class_of(hint: Any) -> str:
    """Returns the name of the class whose subclasses an annotation takes."""
    for kind in (hint, *get_args(hint)):
        if isinstance(kind, type) and kind.__module__ != "builtins" and not get_args(kind):
            return kind.__name__
    inside = [class_of(each) for each in get_args(hint) if get_args(each)]
    return inside[0] if inside else "class"


def classes_below(hint: Any) -> list[str]:
    """Returns the short names of the classes that an annotation takes and that are known."""
    found: list[str] = []
    for kind in (hint, *get_args(hint)):
        if isinstance(kind, type) and kind.__module__ not in ("builtins", "typing"):
            waiting = [kind]
            while waiting:
                each = waiting.pop(0)
                waiting += each.__subclasses__()
                if not (inspect.isabstract(each) or each.__name__.startswith("_")):
                    found.append(each.__name__)
        elif kind is not hint:
            found += classes_below(kind)
    return list(dict.fromkeys(found))


def named(hint: Any) -> str:
    """Returns an annotation in words; that null is taken too is left out.

    >>> named(int), named(int | None), named(list[str])
    ('a whole number', 'a whole number', 'a list')
    """
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    words[type(None)] = "null"
    if hint in words:
        return words[hint]
    origin, inside = getattr(hint, "__origin__", None), get_args(hint)
    if inside and (origin is None or "Union" in str(origin)):
        return " or ".join(dict.fromkeys(named(e) for e in inside if e is not type(None)))
    if inside and "Literal" in str(origin):
        return f"one of {', '.join(map(str, inside))}" if len(inside) > 1 else str(inside[0])
    kind = origin or hint
    if isinstance(kind, type) and issubclass(kind, (dict, list, tuple)):
        return f"a {kind.__name__}"
    return getattr(kind, "__name__", None) or "what it takes"


def choices(hint: Any) -> list[str]:
    inside = get_args(hint)
    if "Literal" in str(getattr(hint, "__origin__", "")):
        return [str(each) for each in inside]
    return [choice for each in inside if each is not hint for choice in choices(each)]


# Where in which file ----------------------------------------------------------------------------


def is_given(option: str, words: Sequence[str]) -> bool:
    """Whether the command line itself sets an option, or a part of it."""
    return any(
        word.startswith("--") and f"{plain(word[2:].partition('=')[0])}.".startswith(f"{option}.")
        for word in words
    )


def place_of(option: str, files: Sequence[str]) -> str:
    """Returns "FILE, line N, " for the last file that sets an option, or ""."""
    for file in reversed(files):
        try:
            tree = yaml.compose(text_of(file))
        except (OSError, ValueError, yaml.YAMLError):
            continue
        line = _line(tree, option.split("."))
        if line is not None:
            return "" if is_text(file) else f"{file}, line {line}, "
    return ""


def _line(node: yaml.Node | None, path: Sequence[str]) -> int | None:
    if isinstance(node, yaml.SequenceNode):
        return next((n for n in (_line(each, path) for each in node.value) if n is not None), None)
    if not isinstance(node, yaml.MappingNode):
        return None
    for key, value in node.value:
        if key.value in ("init_args", "dict_kwargs"):
            found = _line(value, path)
        elif key.value == path[0]:
            found = _line(value, path[1:]) if path[1:] else key.start_mark.line + 1
        else:
            continue
        if found is not None:
            return found
    return None
