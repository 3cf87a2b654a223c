"""What a stranger's configuration holds that a parser would import, or read from somewhere else:
almost any argument may be a class's name, YAML in a text, or the path of another file.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from ..errors import DataError
from ..plain import known_class
from .configs import DistinctLoader, read_mapping

PACKAGE = __name__.partition(".")[0]
LONGEST = 100_000  # Bytes; configurations of runs have some thousands.


class _PlainLoader(DistinctLoader):
    def compose_node(self, *where: Any) -> Any:
        """Refuses aliases: a few lines of them may stand for billions of values."""
        if self.check_event(yaml.AliasEvent) and self.peek_event().anchor in self.anchors:
            raise DataError("it has an alias (*), which no export writes.")
        return super().compose_node(*where)


def read_foreign(path: Path) -> dict[str, Any]:
    """Returns what a stranger's configuration maps names to; DataError where that is unreadable."""
    if path.stat().st_size > LONGEST:
        raise DataError(f"{path} has more than {LONGEST:,} bytes. Export again.")
    found: dict[str, Any] = read_mapping(path, _PlainLoader)
    return found


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
        yield from (name for entry in value for name in foreign_names(entry))
    elif isinstance(value, str):
        for name in re.findall(r"[^\W\d]\w*(?:\.\w+)+", value):
            first = name.partition(".")[0]
            if (first in sys.modules or find_spec(first)) and not known_class(name):
                yield name
        if _is_elsewhere(value):
            yield value
        try:
            inner = yaml.load(value, _PlainLoader)
        except (DataError, RecursionError):
            yield value
        except (yaml.YAMLError, ValueError):
            pass  # A text for the parser too.
        else:
            yield from () if inner == value else foreign_names(inner)


def _is_elsewhere(text: str) -> bool:
    """Whether a parser may read it as the name of a file, or of one at an address."""
    if re.match(r"\s*[\w+.-]*(::|://)", text):
        return True
    with suppress(OSError, ValueError):  # Too long, or with a NUL.
        path = os.path.expanduser(text.strip())
        return os.path.exists(path) and not os.path.isdir(path)
    return False
