"""Draws docs/idea.png and docs/own_task.png: models of two notebooks beside each other.

python docs/pictures.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from pl_pointwise.compare.plots import BLUE, ORANGE, PURPLE, RED

DOCS = Path(__file__).resolve().parent
PANELS = {
    "average": ("a constraint on the average", ORANGE),
    "large penalty": ("a linear penalty, weight 50", PURPLE),
    "hinge 50": ("a hinge of the right weight", RED),
    "pointwise": ("a constraint on every sample", BLUE),
}


def names_of(notebook: str, until: str) -> dict[str, Any]:
    """What a notebook's cells leave, to the one that makes the name ``until``."""
    cells = json.loads(
        (DOCS.parent / f"notebooks/{notebook}.ipynb").read_text("utf-8")
    )["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code" and until not in names:
            exec(
                "".join(line for line in cell["source"] if not line.startswith("%")),
                names,
            )
    return names


def idea() -> None:
    """Four models that are to cross every bar."""
    names = names_of("the_idea", "CHOSEN")
    figure, panels = plt.subplots(2, 2, figsize=(8, 6), layout="constrained")
    for panel, (name, (title, colour)) in zip(panels.flat, PANELS.items(), strict=True):
        weights = names["CHOSEN"][name][-1]
        said = names["draw"](panel, weights, colour)
        panel.set_title(title, fontweight="bold", fontsize=14)
        panel.set_xlabel(
            f"{said}; distance {names['outcome'](weights)[0]:.1f}", fontsize=14
        )
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=3,
        frameon=False,
        fontsize=13,
    )
    figure.savefig(DOCS / "idea.png", dpi=100)


def digits() -> None:
    """The training digits that each of four models has lost, and how many new ones."""
    names = names_of("own_task", "mosaic")
    figure, panels = plt.subplots(2, 2, figsize=(8, 8.6), layout="constrained")
    titles = [
        "no constraint",
        *(PANELS[name][0] for name in ("average", "hinge 50", "pointwise")),
    ]
    for panel, title, module in zip(
        panels.flat, titles, names["modules"].values(), strict=True
    ):
        images, right = names["read"](module, "train", rotated=False)
        new = names["read"](module, "test", rotated=False)[1]
        panel.imshow(names["mosaic"](images, right), interpolation="nearest")
        panel.set(xticks=[], yticks=[])
        panel.set_title(title, fontweight="bold", fontsize=14)
        lost = f"lost: {(~right).sum()} of {len(right)}; of new ones {(~new).float().mean():.0%}"
        panel.set_xlabel(lost, fontsize=14)
    figure.savefig(DOCS / "own_task.png", dpi=100)


if __name__ == "__main__":
    digits()
    idea()
