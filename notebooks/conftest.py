"""Which notebooks the default set executes: tests/test_notebooks.py reads what all have stored."""

from __future__ import annotations

import pytest

QUICK = ("the_idea.ipynb", "own_task.ipynb")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.suffix == ".ipynb" and item.path.name not in QUICK:
            item.add_marker(pytest.mark.slow)
