"""The bounds of pyproject.toml are versions that the tests were run with.

``constraints.txt`` is the set of the usual run, ``constraints-lowest.txt`` that of ``make
test-lowest``. A bound that neither names is a guess.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

toml = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
ROOT = Path(__file__).resolve().parents[1]
LOWEST_PYTHON = {"python_version": "3.10"}


def requirements() -> list[Requirement]:
    """Of the package itself, and of the extras that the tests were run with."""
    project = toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = list(project["dependencies"])
    for extra in ("language", "reranker", "compare", "example", "demo", "test"):
        lines += [line for line in extras[extra] if not line.startswith("pl-pointwise")]
    return [Requirement(line) for line in dict.fromkeys(lines)]


def pins(name: str) -> dict[str, Version]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    return {canonicalize_name(package): Version(version) for package, version in pairs}


def bound(requirement: Requirement) -> Version:
    (specifier,) = requirement.specifier
    assert specifier.operator == ">="
    return Version(specifier.version)


DIRECT = requirements()


@pytest.mark.parametrize("requirement", DIRECT, ids=str)
def test_lower_bound_was_run_and_the_usual_run_is_within_it(requirement: Requirement) -> None:
    runs = "constraints-lowest.txt"
    if requirement.marker is not None and not requirement.marker.evaluate(LOWEST_PYTHON):
        runs = "constraints.txt"
    name = canonicalize_name(requirement.name)
    assert pins(runs)[name] == bound(requirement)
    assert pins("constraints.txt")[name] >= bound(requirement)
