"""Files can be read one by one: none imports another in a circle, and rooms stand on floors."""

from __future__ import annotations

import ast
import re
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


def floors() -> dict[str, int]:
    """The floor of each module or package in the drawing of CONTRIBUTING.md, 0 on top."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    drawing = text.partition("## The tree")[2].partition("```\n")[2].partition("```")[0]
    found: dict[str, int] = {}
    for floor, line in enumerate(drawing.splitlines()):
        names = re.match(r"(?:[a-z_.]+(?:  |$))*", line)
        found |= dict.fromkeys(names[0].split() if names else [], floor)
    return found


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
            named = {source, f"{source}.__init__"}
            named |= {f"{source}.{alias.name}" for alias in node.names}
            found[name].update(files.keys() & named - {name})
    return found


def test_no_file_imports_another_in_a_circle() -> None:
    assert len(imports()) > 100
    TopologicalSorter(imports()).prepare()


def floor_of(name: str) -> int:
    """The floor of a file; a file that is drawn by itself stands there, and not with its folder."""
    drawn, parts = floors(), name.split(".")[1:]
    prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next(drawn[prefix] for prefix in prefixes if prefix in drawn)


def test_imports_go_down() -> None:
    # What users name, of all floors.
    doors = {"pl_pointwise.__init__", "pl_pointwise.__main__"}
    assert len(floors()) > 30
    upwards = {
        (name, used)
        for name, of_file in imports().items()
        for used in of_file - doors
        if name not in doors and floor_of(used) < floor_of(name)
    }
    assert not upwards


def test_what_is_drawn_is_there() -> None:
    there = {
        name.removeprefix("pl_pointwise.").removesuffix(".__init__")
        for name in imports()
    }
    assert {name for name in floors() if name not in there} == set()


def test_only_what_loads_a_model_knows_tasks() -> None:
    above = ("pl_pointwise.tasks", "pl_pointwise.callbacks")
    knowing = {
        name
        for name, used in imports().items()
        if not name.startswith(above) and any(other.startswith(above) for other in used)
    }
    assert knowing == {"pl_pointwise.export.loading"}


def test_no_task_knows_another() -> None:
    shared = ("common", "language_model", "__init__")
    for name, used in imports().items():
        if name.startswith("pl_pointwise.tasks."):
            task = name.split(".")[2]
            others = {
                other.split(".")[2] for other in used if "pl_pointwise.tasks." in other
            }
            if task != "__init__":
                assert not others - {task, *shared}, name


@pytest.mark.parametrize(
    "package", [pl_pointwise, pl_pointwise.callbacks, pl_pointwise.tasks]
)
def test_type_checkers_see_every_public_name(package: ModuleType) -> None:
    """A name that is imported on use only is of any type to them."""
    tree = ast.parse(Path(str(package.__file__)).read_text(encoding="utf-8"))
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    lines = [node for node in guarded.body if isinstance(node, ast.ImportFrom)]
    seen = {name.asname or name.name for line in lines for name in line.names}
    assert seen == {*package.__all__}, (
        f"{package.__file__}: name {', '.join(sorted(seen ^ {*package.__all__}))} twice, below "
        "TYPE_CHECKING and in the table by which it is imported on use."
    )
