"""What options and classes there are, and which of them a wrong name is most like."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints


def plain(option: str) -> str:
    """An option without the steps that a command line may leave out.

    >>> plain("model.init_args.training.optimization.init_args.lr")
    'model.training.optimization.lr'
    """
    return ".".join(part for part in option.split(".") if part not in ("init_args", "dict_kwargs"))


def meant(name: str, known: Sequence[str]) -> str:
    """Returns the dotted name that is most like ``name``, or "": whole, its last or first step.

    >>> meant("trainer.max_epoks", ["trainer.max_epochs", "trainer.max_time", "model"])
    'trainer.max_epochs'
    >>> meant("lern_rate", ["tolerance", "training.optimization.learning_rate"])
    'training.optimization.learning_rate'
    >>> meant("modle.tolerance", ["trainer", "model"])
    'model.tolerance'
    """
    root, dot, rest = plain(name).partition(".")
    roots = {each.partition(".")[0] for each in known}
    if dot and root not in roots and (near := difflib.get_close_matches(root, roots, 1, 0.8)):
        return f"{near[0]}.{rest}"
    lasts = {each.rpartition(".")[2]: each for each in reversed(known)}
    whole = difflib.get_close_matches(plain(name), known, n=1)
    last = difflib.get_close_matches(name.rpartition(".")[2], lasts, n=1)
    return whole[0] if whole else lasts[last[0]] if last else ""


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    """Returns the dotted names of a parser's options, fields of dataclasses among them."""
    names = list[str]()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            names += [name for each in action.choices.values() for name in options_of(each)]
        elif action.dest not in (argparse.SUPPRESS, "help"):
            names.append(plain(action.dest))
            names += _fields(getattr(action, "_typehint", None), plain(action.dest))
    return list(dict.fromkeys(names))


def _fields(hint: Any, name: str) -> Iterable[str]:
    for kind in (hint, *get_args(hint)):
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            hints = get_type_hints(kind)
            for field in dataclasses.fields(kind):
                yield f"{name}.{field.name}"
                yield from _fields(hints[field.name], f"{name}.{field.name}")


def choices(hint: Any) -> list[str]:
    """Returns the values of an annotation's literals, and the short names of its classes."""
    if get_origin(hint) is Literal:
        return [str(each) for each in get_args(hint)]
    if get_args(hint):
        return [choice for each in get_args(hint) for choice in choices(each)]
    if not isinstance(hint, type) or hint.__module__ == "builtins":
        return []
    kinds: list[type] = hint.__subclasses__()
    below = [choice for kind in kinds for choice in choices(kind)]
    hidden = inspect.isabstract(hint) or hint.__name__.startswith("_")
    return below if hidden else [hint.__name__, *below]
