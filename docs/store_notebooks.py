"""Executes the notebooks and stores them with their outputs: `make notebooks`.

The site and a repository's web view show what is stored and execute nothing. The notebooks run in
an empty folder, so none can rely on where it lies. What a run leaves that differs for nothing, such
as times, is not stored.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
SOURCES = "sources_sha256"
"""The metadata field that says of which code the stored outputs are."""
_PATH = re.compile(r"(?<![\w./:<])/(?:[\w.-]+/)+[\w.-]*|\b[A-Z]:\\\w+")
"""An absolute path, which is of the machine that a notebook ran on."""


def fingerprint(notebook: Any) -> str:
    """Returns the hash of a notebook's code."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()


def executed(notebook: Any) -> Any:
    """Returns a notebook as a run of it in an empty folder leaves it.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    from nbclient import NotebookClient

    for cell in notebook.cells:
        cell.metadata = nbformat.NotebookNode()
        if _draws(cell) or cell.source.startswith("%"):
            # The site folds the code, so that the picture, or the text after the set-up, is seen.
            cell.metadata["tags"] = ["hide-input"]
    notebook.metadata = nbformat.NotebookNode(
        kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"}
    )
    with tempfile.TemporaryDirectory() as empty:
        client = NotebookClient(
            notebook,
            timeout=1800,  # a cell of keep.ipynb trains for minutes
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": empty}},
        )
        client.execute()
    # Of the interpreter nothing but the language: a stored notebook is the same on all of them.
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.metadata[SOURCES] = fingerprint(notebook)
    return notebook


def problems(notebook: Any) -> list[str]:
    """Returns what is wrong with a stored notebook; nothing if it can be shown."""
    found = []
    if notebook.metadata.get(SOURCES) != fingerprint(notebook):
        found.append("its outputs are not of its code")
    pictures = 0
    for place, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        if cell.execution_count is None:
            found.append(f"cell {place}: never executed")
        drawn = 0
        for output in cell.outputs:
            if output.output_type == "error" or output.get("name") == "stderr":
                found.append(
                    f"cell {place}: {output.output_type} {output.get('name', '')}"
                )
            drawn += "image/png" in output.get("data", {})
        if _draws(cell) and not drawn:
            found.append(f"cell {place}: draws a picture and has none")
        pictures += drawn
        if set(cell.metadata) - {"tags"}:
            found.append(f"cell {place}: metadata of a run")
    if not pictures:
        found.append("no picture")
    text = _text(notebook)
    found += [f"the path {path} in sources or outputs" for path in _PATH.findall(text)]
    found += [
        f"{word!r} in sources or outputs"
        for word in ("Warning", "it/s]")
        if word in text
    ]
    return found


def _draws(cell: Any) -> bool:
    return cell.cell_type == "code" and "plt.subplot" in cell.source


def _text(notebook: Any) -> str:
    """Returns sources and outputs without the bytes of pictures."""
    parts = []
    for cell in notebook.cells:
        parts.append(cell.source)
        for output in cell.get("outputs", []):
            parts.append(str(output.get("text", "")))
            parts += [
                str(v)
                for kind, v in output.get("data", {}).items()
                if kind != "image/png"
            ]
    return "\n".join(parts)


def main(names: list[str]) -> int:
    """Executes and stores the named notebooks, or all; returns 1 if one is not fit to be shown."""
    wrong, paths = 0, sorted(FOLDER.glob("*.ipynb"))
    if unknown := set(names) - {path.stem for path in paths}:
        sys.exit(f"No such notebook: {', '.join(sorted(unknown))}.")
    for path in paths:
        if names and path.stem not in names:
            continue
        notebook = executed(nbformat.read(path, as_version=4))
        nbformat.write(notebook, path)
        found = problems(notebook)
        wrong += bool(found)
        print(f"{path.name}: {'; '.join(found) or 'stored'}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
