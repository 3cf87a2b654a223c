"""Python files of the current folder: only what a configuration or an option names is imported.

Whoever enters a data set's folder to train on it must not run what lies there under the name of an
optional package: libraries probe for dozens. So the folder is not on ``sys.path``. A finder behind
all others, for what is found nowhere else, knows two kinds of names: the first part of a class path
that a configuration or an option gives, and what a file of the folder itself imports.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType
from typing import Any

NAMED = "PL_POINTWISE_OWN_CODE"
"""For processes that are started, as workers are: the folder, and the names so far."""
CLASS_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


class OwnCodeFinder(MetaPathFinder):
    """Finds modules of one folder by name.

    Args:
        folder: the current one.
        names: of top-level modules.
    """

    def __init__(self, folder: str, names: Iterable[str] = ()) -> None:
        self.folder = folder
        self.names = set(names)

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> ModuleSpec | None:
        if path is not None:  # Within a package, whose own path is known.
            return None
        if name not in self.names and not self._is_asked_by_own_code():
            return None
        spec = PathFinder.find_spec(name, [self.folder])
        if spec is not None:  # A worker that is handed its objects asks for it by name.
            self.allow([name])
        return spec

    def allow(self, names: Iterable[str]) -> None:
        """Adds names, for the processes that this one starts too."""
        self.names.update(names)
        os.environ[NAMED] = os.pathsep.join([self.folder, *sorted(self.names)])

    def _is_asked_by_own_code(self) -> bool:
        """Whether the import statement stands in a file of the folder, as that of a helper does."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            if not file.startswith("<frozen importlib") and file != importlib.__file__:
                return self._is_own(file)
            frame = frame.f_back
        return False

    def _is_own(self, file: str) -> bool:
        inside = os.path.realpath(file).startswith(
            os.path.realpath(self.folder) + os.sep
        )
        # An environment may lie in the folder.
        return inside and not {"site-packages", "dist-packages"}.intersection(
            file.split(os.sep)
        )


def installed() -> OwnCodeFinder | None:
    """The finder of this process, if it has one."""
    for finder in sys.meta_path:
        if isinstance(finder, OwnCodeFinder):
            return finder
    return None


def allow_current_folder(words: Iterable[str]) -> None:
    """Lets the command's words, and the configurations that it will read, name own code."""
    finder = installed()
    if finder is None or finder.folder != os.getcwd():
        if finder is not None:
            sys.meta_path.remove(finder)  # Of another folder.
        finder = OwnCodeFinder(os.getcwd())
        sys.meta_path.append(finder)
    for word in words:
        value = word.partition("=")[2]
        finder.allow(named_in(value or word))


def allow_named(value: Any) -> None:
    """Adds what a configuration's value names, where the current folder's code may be named."""
    finder = installed()
    if finder is not None:
        finder.allow(named_in(value))


def named_in(value: Any) -> list[str]:
    """The first parts of the class paths anywhere in a plain value.

    >>> named_in({"model": {"class_path": "mine.Model"}, "data": "a.b.C", "text": "Mr. Smith"})
    ['mine', 'a']
    """
    if isinstance(value, Mapping):
        return named_in(list(value.values()))
    if isinstance(value, (list, tuple)):
        names = []
        for entry in value:
            names += named_in(entry)
        return names
    text = value.strip() if isinstance(value, str) else ""
    if CLASS_PATH.fullmatch(text) and not os.path.exists(text):
        return [text.partition(".")[0]]
    return []


def allow_as_the_parent_did() -> None:
    """In a process that another one started anew: a worker that reads the data, or a rank."""
    folder, *names = os.environ.get(NAMED, "").split(os.pathsep)
    if folder and installed() is None and os.getcwd() == folder:
        finder = OwnCodeFinder(folder, names)
        sys.meta_path.append(finder)
