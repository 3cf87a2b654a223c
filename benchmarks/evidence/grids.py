"""The grid of a task: every method with the settings it is tuned over.

A grid is YAML::

    paths: {margin: model.init_args.tolerance}     # settings that are not the formulation's
    methods:
      as it is: {role: reference, overlay: {trainer: {max_epochs: 0}}}
      pointwise:
        role: ours
        overlay: reranker/pointwise                # as in a methods file of `pl-pointwise compare`
        settings:
        - {alpha: [0.1, 1], dual_lr: 0.1}   # two settings: each value of a list
        - {alpha: 1, dual_lr: 0.4, margin: 4}

A role is "ours", "rival", or "reference" for what has nothing to tune.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from pl_pointwise.errors import one_of

Role = Literal["ours", "rival", "reference"]

FORMULATION = "model.init_args.formulation.init_args."
"""Where a setting goes whose path the grid does not name."""


@dataclass(frozen=True)
class Entry:
    """One method in one setting.

    Attributes:
        method: its name.
        setting: the values of this setting as text, "" where there is nothing to set.
        role: ours, a rival or a reference.
        overlay: what it changes, as in a methods file.
    """

    method: str
    setting: str
    role: Role
    overlay: Any

    @property
    def name(self) -> str:
        """As a comparison names it."""
        return named(self.method, self.setting)


def named(method: str, setting: str) -> str:
    """Returns a method with its setting, if it has one."""
    return f"{method}, {setting}" if setting else method


def read_grid(path: Path) -> list[Entry]:
    """Returns every method in every setting, in the grid's order.

    Raises:
        ValueError: an unknown role, or a setting that stands twice.
    """
    grid = yaml.safe_load(path.read_text(encoding="utf-8"))
    paths = grid.get("paths", {})
    entries = []
    for method, described in grid["methods"].items():
        one_of("role", described["role"], ("ours", "rival", "reference"))
        for values in expanded(described.get("settings", [{}])):
            overlay = described.get("overlay", {})
            parts = [*overlay] if isinstance(overlay, list) else [overlay]
            parts += [overlay_of(values, paths)] if values else []
            setting = ", ".join(f"{name}={value}" for name, value in values.items())
            entries.append(Entry(method, setting, described["role"], parts))
    names = [entry.name for entry in entries]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(
            f"{path}: these settings stand twice: {', '.join(sorted(twice))}."
        )
    return entries


def expanded(settings: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the settings with every list in them multiplied out.

    >>> expanded([{"alpha": [0.1, 1], "beta": 2}, {"alpha": 3}])
    [{'alpha': 0.1, 'beta': 2}, {'alpha': 1, 'beta': 2}, {'alpha': 3}]
    """
    found = []
    for values in settings:
        choices = [
            value if isinstance(value, list) else [value] for value in values.values()
        ]
        found += [
            dict(zip(values, chosen, strict=True))
            for chosen in itertools.product(*choices)
        ]
    return found


def overlay_of(values: Mapping[str, Any], paths: Mapping[str, str]) -> dict[str, Any]:
    """Returns the configuration that sets each value at its path.

    >>> overlay_of({"margin": 4}, {"margin": "model.init_args.tolerance"})
    {'model': {'init_args': {'tolerance': 4}}}
    """
    overlay: dict[str, Any] = {}
    for name, value in values.items():
        *above, last = paths.get(name, FORMULATION + name).split(".")
        inner = overlay
        for part in above:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return overlay


def write_methods(entries: list[Entry], path: Path) -> None:
    """Writes the entries as a methods file of `pl-pointwise compare`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    methods = {entry.name: entry.overlay for entry in entries}
    path.write_text(
        yaml.safe_dump(methods, sort_keys=False, allow_unicode=True), encoding="utf-8"
    )
