"""What only an extra of the installation brings, and what is imported only when it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any


class MissingPackageError(ImportError):
    """A package is not installed; says which, and how to install it."""


@contextmanager
def needs(extra: str, user: str) -> Iterator[None]:
    """Says which extra to install where an import in the block fails; ``user`` is what needs it."""
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
    """A package's ``__getattr__``, which imports classes on use; ``modules``: by class name."""

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return get


def import_classes(words: Iterable[str] | None = None) -> None:
    """Imports the classes among the words (None: all): jsonargparse finds only what is imported."""
    wanted = None if words is None else {*words}
    for package in ("pl_pointwise.tasks", "pl_pointwise.callbacks"):
        module = import_module(package)
        for name in module.__all__:
            if wanted is None:
                # For a list of all: those of an extra that is not there are left out.
                with suppress(MissingPackageError):
                    getattr(module, name)
            elif name in wanted:
                getattr(module, name)
