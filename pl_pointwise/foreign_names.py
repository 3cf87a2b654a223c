"""Names in a configuration of strangers that a parser would import."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


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


def _hints(kind: type) -> dict[str, Any]:
    """The types of a class's arguments, and of those that it hands on to its base classes."""
    found: dict[str, Any] = {}
    for each in reversed(kind.__mro__):
        try:
            found |= get_type_hints(vars(each).get("__init__"))
        except Exception:  # A name that is there for type checkers alone, or no __init__.
            found |= getattr(vars(each).get("__init__"), "__annotations__", {})
    return found
