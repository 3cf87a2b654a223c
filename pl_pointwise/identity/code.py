"""Code of one's own behind a model: the source file of a class, with those that it imports.

What is installed, and this package, is nobody's own.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from .files import digest_now

PACKAGE = __name__.partition(".")[0]
LIBRARIES = {"site-packages", "dist-packages"}


def own_code(objects: Iterable[Any]) -> dict[str, str]:
    """The digests of the source files of one's own behind these objects' classes, by path."""
    waiting = []
    for instance in objects:
        waiting += [parent.__module__ for parent in type(instance).__mro__]
    digests = dict[str, str]()
    seen = set[str]()
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        if name in seen or module is None:
            continue
        seen.add(name)
        path = _own_file(module)
        if path is None:
            continue
        digest = digest_now(path)
        if digest is not None:
            digests[str(path)] = digest
        # What the file imported stands among its names: modules, classes, functions.
        for value in vars(module).values():
            imported = _module_of(value)
            if isinstance(imported, str):
                waiting.append(imported)
    return dict(sorted(digests.items()))


def _module_of(value: Any) -> str | None:
    """The name of the module that a value is, or that its code stands in."""
    if isinstance(value, ModuleType):
        return value.__name__
    is_code = inspect.isclass(value) or inspect.isfunction(value)
    return getattr(value, "__module__", None) if is_code else None


def _own_file(module: ModuleType) -> Path | None:
    """The source file of a module that is neither installed nor of this package."""
    file = getattr(module, "__file__", None)
    package = module.__name__.partition(".")[0]
    if not file or package == PACKAGE or package in sys.stdlib_module_names:
        return None
    path = Path(file)
    return None if LIBRARIES.intersection(path.parts) else path.absolute()


def digest_of_code(files: Mapping[str, str]) -> str | None:
    """One digest of source files, wherever they lie; None of no files."""
    if not files:
        return None
    lines = sorted(f"{Path(path).name} {digest}" for path, digest in files.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
