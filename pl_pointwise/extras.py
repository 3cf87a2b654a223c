"""What only an extra of the installation brings, and what is imported only when it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from typing import Any


class MissingPackageError(ImportError):
    """A package is not installed; says which, and how to install it."""


@contextmanager
def needs(extra: str, user: str) -> Iterator[None]:
    """Says which package is lacking, and which extra brings it, where an import in the block fails.

    user: what needs it, for the message.

    Raises:
        MissingPackageError: a package other than this one is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "pl_pointwise"):
            raise
        raise MissingPackageError(
            f"{user} needs {package}, which is not installed: pip install 'pl-pointwise[{extra}]'",
            name=error.name,
        ) from None


def imported_on_use(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a package's ``__getattr__``, which imports its classes when they are used.

    modules: by the name of a class, the module of the package that it is in.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return get


def import_classes(words: Iterable[str] | None = None) -> None:
    """Imports the tasks' and callbacks' classes that are among the words, by their short names.

    jsonargparse finds a class by its short name only if it is imported, and lists only those.

    words: None takes all whose packages are installed.
    """
    for package in map(import_module, ("pl_pointwise.tasks", "pl_pointwise.callbacks")):
        for name in package.__all__ if words is None else {*words}.intersection(package.__all__):
            with suppress(MissingPackageError) if words is None else nullcontext():
                getattr(package, name)
