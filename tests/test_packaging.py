"""What a package index, a conda channel and a citation are told is what the project says."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import yaml

if sys.version_info < (3, 11):
    pytest.skip("tomllib comes with Python 3.11", allow_module_level=True)
import tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
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
    optional = [line for extra in EXTRAS for line in extras[extra] if "pl-pointwise" not in line]
    wanted = {*conda(PROJECT["dependencies"]), f"python {PROJECT['requires-python']}"}
    assert set(recipe["requirements"]["run"]) == wanted
    assert set(recipe["requirements"]["run_constraints"]) == conda(optional)
    assert recipe["context"]["version"] == PROJECT["version"]
    (entry,) = recipe["build"]["python"]["entry_points"]
    assert entry == f"pl-pointwise = {PROJECT['scripts']['pl-pointwise']}"
    assert recipe["about"]["license"] == PROJECT["license"]


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
