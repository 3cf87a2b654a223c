"""What a package index, a conda channel and a citation are told is what the project says.

And the bounds of pyproject.toml are versions that the tests were run with: ``constraints.txt`` is
the set of the usual run, ``constraints-lowest.txt`` that of ``make test-lowest``. A bound that
neither names is a guess.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

toml = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
ROOT = Path(__file__).resolve().parents[1]
TABLES = toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, SETUPTOOLS = TABLES["project"], TABLES["tool"]["setuptools"]
CONDA_NAMES = {
    "huggingface-hub": "huggingface_hub",
    "jsonargparse[signatures]": "jsonargparse-signatures",
    "matplotlib": "matplotlib-base",
    "torch": "pytorch",
}
EXTRAS = ["language", "reranker", "compare", "example"]


def conda(lines: list[str]) -> set[str]:
    found = (re.fullmatch(r"([^>]+)(>=.+)", line).groups() for line in lines)
    return {f"{CONDA_NAMES.get(name, name)} {bound}" for name, bound in found}


def test_the_conda_recipe_asks_for_what_the_package_asks_for() -> None:
    recipe = yaml.safe_load((ROOT / "docs/conda/recipe.yaml").read_text())
    extras = PROJECT["optional-dependencies"]
    optional = [
        line for extra in EXTRAS for line in extras[extra] if "pl-pointwise" not in line
    ]
    wanted = {*conda(PROJECT["dependencies"]), f"python {PROJECT['requires-python']}"}
    assert set(recipe["requirements"]["run"]) == wanted
    assert set(recipe["requirements"]["run_constraints"]) == conda(optional)
    assert recipe["context"]["version"] == PROJECT["version"]
    (entry,) = recipe["build"]["python"]["entry_points"]
    assert entry == f"pl-pointwise = {PROJECT['scripts']['pl-pointwise']}"
    assert recipe["about"]["license"] == PROJECT["license"]


def test_every_folder_of_code_is_a_package_of_the_wheel() -> None:
    """An editable install finds a folder that is not listed; an installed package lacks it."""
    found = set[str]()
    prefixes = {
        "pl_pointwise": "",
        "tasks": "pl_pointwise.",
        "callbacks": "pl_pointwise.",
    }
    for root, prefix in prefixes.items():
        for file in (ROOT / root).rglob("__init__.py"):
            folder = file.parent.relative_to(ROOT).as_posix()
            found.add(f"{prefix}{folder.replace('/', '.')}")
    listed = set(SETUPTOOLS["packages"])
    assert found == listed, (
        f"packages of pyproject.toml: add {sorted(found - listed)}, "
        f"take out {sorted(listed - found)}."
    )


def test_the_citation_has_the_packages_version_and_licence() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]


def test_every_link_of_the_packages_page_is_whole_and_leads_to_a_file() -> None:
    text = (ROOT / "README.md").read_text()
    root = "https://example.org/owner/project"
    script = runpy.run_path(str(ROOT / "docs/package_readme.py"))
    found = script["with_whole_links"](text, root, "v1")
    targets = re.findall(r"\]\(([^)\s]+)\)", found)
    assert len(targets) > 10
    for target in targets:
        assert target.startswith("https://")
        if target.startswith(root):
            kind, _, path = target.removeprefix(f"{root}/").split("/", 2)
            assert kind == ("raw" if path.endswith(".png") else "blob")
            assert (ROOT / path.partition("#")[0]).is_file()


# Versions -----------------------------------------------------------------------------------------

LOWEST_PYTHON = {"python_version": "3.10"}


def requirements() -> list[Requirement]:
    """Of the package itself, and of the extras that the tests were run with."""
    extras = PROJECT["optional-dependencies"]
    lines = list(PROJECT["dependencies"])
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
def test_lower_bound_was_run_and_the_usual_run_is_within_it(
    requirement: Requirement,
) -> None:
    runs = "constraints-lowest.txt"
    if requirement.marker is not None and not requirement.marker.evaluate(
        LOWEST_PYTHON
    ):
        runs = "constraints.txt"
    name = canonicalize_name(requirement.name)
    assert pins(runs)[name] == bound(requirement)
    assert pins("constraints.txt")[name] >= bound(requirement)
