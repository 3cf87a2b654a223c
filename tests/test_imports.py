"""The core can be read file by file: none imports another in a circle, none imports the module."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

CORE = Path(__file__).resolve().parents[1] / "pl_pointwise"
USERS = {"__init__", "cli", "export", "model_card", "next_steps"}
"""Files that take a whole module, as users do."""


def imports() -> dict[str, set[str]]:
    """The files of the core that each imports, for types alone too."""
    files = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in CORE.glob("*.py")}
    found: dict[str, set[str]] = {name: set() for name in files}
    for name, tree in files.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                named = [node.module] if node.module else [each.name for each in node.names]
                found[name].update(files.keys() & {part.partition(".")[0] for part in named})
    return found


def test_no_file_imports_another_in_a_circle() -> None:
    TopologicalSorter(imports()).prepare()


def test_the_parts_of_the_module_do_not_import_it() -> None:
    assert {name for name, used in imports().items() if "module" in used} <= USERS
