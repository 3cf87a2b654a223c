"""Files can be read one by one: none imports another in a circle, and rooms stand on floors."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest

import pl_pointwise.callbacks
import pl_pointwise.tasks

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"pl_pointwise": "pl_pointwise", "pl_pointwise.tasks": "tasks"}
FOLDERS["pl_pointwise.callbacks"] = "callbacks"
USERS = {"__init__", "cli", "export", "model_card", "samples", "certification", "of_test"}
"""Files that take a whole module, as users do."""
ABOVE = {
    "lagrangian": {"training", "command_line", "compare", "requirements", "module", "run"},
    "training": {"command_line", "compare", "requirements", "module"},
    "requirements": {"compare"},
    "tasks.language_model.text": {"tasks.language_model.likelihood", "tasks.language_model.model"},
}
"""What a room does not import."""


@cache
def imports() -> dict[str, set[str]]:
    """The files of the package that each imports, for types alone too."""
    files = {}
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            files[".".join((package, *parts))] = path
    found: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom):
                continue
            base = name.split(".")[: -node.level] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            named = {source} | {f"{source}.{each.name}" for each in node.names}
            found[name].update(files.keys() & named)
    return found


def test_no_file_imports_another_in_a_circle() -> None:
    assert len(imports()) > 100
    TopologicalSorter(imports()).prepare()


def test_the_parts_of_the_module_do_not_import_it() -> None:
    tops = ("pl_pointwise.tasks", "pl_pointwise.callbacks")
    found = {
        name.rpartition(".")[2]
        for name, used in imports().items()
        if "pl_pointwise.module" in used and not name.startswith(tops)
    }
    assert found <= USERS


@pytest.mark.parametrize("room", ABOVE)
def test_a_room_imports_none_above_it(room: str) -> None:
    inside = {n: used for n, used in imports().items() if n.startswith(f"pl_pointwise.{room}.")}
    assert inside
    above = tuple(f"pl_pointwise.{other}" for other in ABOVE[room])
    assert not {(n, u) for n, used in inside.items() for u in used if u.startswith(above)}


@pytest.mark.parametrize("package", [pl_pointwise, pl_pointwise.callbacks, pl_pointwise.tasks])
def test_type_checkers_see_every_public_name(package: ModuleType) -> None:
    """A name that is imported on use only is of any type to them."""
    tree = ast.parse(Path(str(package.__file__)).read_text(encoding="utf-8"))
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    lines = [node for node in guarded.body if isinstance(node, ast.ImportFrom)]
    assert {name.asname or name.name for line in lines for name in line.names} == {*package.__all__}
