"""Every notebook is stored as it is to be shown: with its outputs, and with nothing of this run.

That they run is tested by nbmake, which executes them.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
problems = runpy.run_path(str(ROOT / "docs/store_notebooks.py"))["problems"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_stored_notebook_can_be_shown(path: Path) -> None:
    """Its outputs are of its code; run `make notebooks` where they are not."""
    notebook = nbformat.read(path, as_version=4)
    assert problems(notebook) == []
    assert "assert " not in "\n".join(
        c.source for c in notebook.cells if c.cell_type == "code"
    )


@pytest.mark.parametrize("how", ["no picture", "other code", "stderr", "in /home/me"])
def test_what_must_not_be_stored_is_found(how: str) -> None:
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    cell = next(
        c for c in notebook.cells if c.cell_type == "code" and "plt.subplot" in c.source
    )
    if how == "no picture":
        cell.outputs = []
    elif how == "other code":
        cell.source += "\n"
    else:
        name, text = ("stderr", "done") if how == "stderr" else ("stdout", how)
        output = {"output_type": "stream", "name": name, "text": text}
        cell.outputs.append(nbformat.from_dict(output))
    assert problems(notebook)
