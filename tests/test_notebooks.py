"""Every notebook is stored as it is to be shown: with its outputs, and with nothing of this run.

That they run is tested by nbmake, which executes them.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.scripts import module_of

nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(name="store", scope="module")
def module_that_stores() -> ModuleType:
    return module_of(ROOT / "docs/store_notebooks.py")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_stored_notebook_can_be_shown(path: Path, store: ModuleType) -> None:
    """Its outputs are of its code; run `make notebooks` where they are not."""
    notebook = nbformat.read(path, as_version=4)
    assert store.problems(notebook) == []
    assert "assert " not in "\n".join(c.source for c in notebook.cells if c.cell_type == "code")


def spoil(notebook: Any, how: str) -> None:
    """Does to the first picture's cell what must not be stored."""
    cell = next(c for c in notebook.cells if c.cell_type == "code" and "plt.subplot" in c.source)
    output: dict[str, Any] = {"output_type": "stream", "name": "stdout", "text": "done"}
    if how == "no picture":
        cell.outputs = []
        return
    if how == "other code":
        cell.source += "\n"
        return
    if how == "stderr":
        output["name"] = "stderr"
    elif how == "error":
        output = {"output_type": "error", "ename": "E", "evalue": "", "traceback": []}
    else:
        output["text"] = how
    cell.outputs.append(nbformat.from_dict(output))


@pytest.mark.parametrize(
    "how",
    ["no picture", "other code", "stderr", "error", "in /home/me", "C:\\Users", "UserWarning: so"],
)
def test_what_must_not_be_stored_is_found(how: str, store: ModuleType) -> None:
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    spoil(notebook, how)
    assert store.problems(notebook)
