"""Names in a configuration of strangers that a parser would import."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule

from .formulations import Formulation

PACKAGE = __name__.partition(".")[0]


def foreign_names(value: Any) -> Iterator[str]:
    """Dotted names of what is installed, anywhere in a plain value; none of them is imported.

    Not those of classes that this package ships, and of modules, data and formulations that are
    loaded already.
    """
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        yield from (name for entry in value for name in foreign_names(entry))
    elif isinstance(value, str):  # Which may be YAML.
        for name in re.findall(r"[^\W\d]\w*(?:\.\w+)+", value):
            first = name.partition(".")[0]
            if (first in sys.modules or find_spec(first)) and not _is_known(name):
                yield name


def _is_known(path: str) -> bool:
    module, _, name = path.rpartition(".")
    if module.partition(".")[0] == PACKAGE:
        with suppress(ImportError):
            importlib.import_module(module)
    found = getattr(sys.modules.get(module), name, None)
    return isinstance(found, type) and (
        found.__module__.startswith(f"{PACKAGE}.")
        or issubclass(found, (LightningModule, LightningDataModule, Formulation))
    )
