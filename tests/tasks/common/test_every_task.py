"""What a task needs beside its own folder; each failure names the file that lacks it.

Walks over the folders of ``tasks/`` with a ``configs/base.yaml``, so a new one is found by itself.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import pl_pointwise.tasks
from pl_pointwise.cli import PointwiseCLI
from pl_pointwise.command_line.configs import by_kind
from pl_pointwise.module import PointwiseModule
from pl_pointwise.task import Task
from tests.tasks.common.test_hostile_files import LOADERS

ROOT = Path(__file__).resolve().parents[3]
TASKS = sorted(by_kind()["base"])


@pytest.mark.parametrize("task", TASKS)
def test_a_page_runs_the_task(task: str) -> None:
    command = re.compile(rf"--config {task}(?![\w/.-])")
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert any(command.search(page.read_text("utf-8")) for page in pages), (
        f"No page says --config {task}: write docs/{task}.md with a command that runs it, and name "
        "it in the navigation of docs/index.md and in README's table."
    )


@pytest.mark.parametrize("task", TASKS)
def test_a_test_runs_the_task(task: str) -> None:
    named = re.compile(rf"[\"']{task}[\"'/]")
    files = [
        path for path in (ROOT / "tests/tasks").rglob("*.py") if path != Path(__file__)
    ]
    assert any(named.search(path.read_text("utf-8")) for path in files), (
        f"No test runs {task}: give it one in tests/tasks/{task}/, by train() of "
        "tests/tasks/conftest.py on records small enough."
    )


class Parsed(PointwiseCLI):
    """The options alone: no model is loaded."""

    def instantiate_classes(self) -> None:
        """Builds nothing."""


@pytest.mark.parametrize("task", TASKS)
def test_a_shared_method_stands_over_the_task(task: str) -> None:
    """Its options have to be the task's, and the base's formulation must leave none of its own."""
    found = Parsed(["--config", task, "--config", f"{task}/penalty_hinge"], run=False)
    formulation = found.config.model.init_args.formulation
    assert formulation.class_path == "pl_pointwise.Penalty"
    assert formulation.init_args.shape == "hinge"


def test_the_files_of_every_task_are_tried_with_what_is_hostile() -> None:
    public = {n for n in pl_pointwise.tasks.__all__ if n.endswith("DataModule")}
    tried = {loader[0].__name__ for loader in LOADERS.values()}
    assert public <= tried, (
        f"{', '.join(sorted(public - tried))}: add it, with good rows, to LOADERS of "
        "tests/tasks/common/test_hostile_files.py."
    )


def private_names() -> set[str]:
    """The attributes of a module that are the package's own."""
    assigned = set[str]()
    for kind in (PointwiseModule, Task):
        tree = ast.parse(inspect.getsource(kind))
        for node in ast.walk(tree):
            of_self = (
                isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
            )
            if of_self and node.attr.startswith("_") and not node.attr.startswith("__"):
                assigned.add(node.attr)
    return assigned


def private_reads(tree: ast.AST, names: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_no_task_reads_what_is_private_to_its_base() -> None:
    """``self._run`` in a task is found by no linter, and goes with the next version."""
    names = private_names()
    assert {"_run", "_lagrangian"} <= names
    reads = []
    for path in sorted((ROOT / "tasks").rglob("*.py")):
        found = private_reads(ast.parse(path.read_text("utf-8")), names)
        reads += [f"{path.relative_to(ROOT)}, {read}" for read in found]
    assert not reads, (
        f"{'; '.join(reads)}. Public are measured, dual_steps, forces(name), in_force(name), "
        "multipliers, prices and closing; for other things make a method of "
        "pl_pointwise/module.py."
    )


def test_a_private_read_is_seen() -> None:
    tree = ast.parse("self._run.x\nmodule._lagrangian\nself._mine\nself.forces(name)")
    assert sorted(private_reads(tree, private_names())) == [
        "line 1: self._run",
        "line 2: module._lagrangian",
    ]
