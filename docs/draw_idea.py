"""Draws docs/idea.png: four models of notebooks/the_idea.ipynb beside each other.

python docs/draw_idea.py
"""

from __future__ import annotations

import json
from pathlib import Path

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


def main() -> None:
    cells = json.loads((DOCS.parent / "notebooks/the_idea.ipynb").read_text("utf-8"))["cells"]
    names: dict = {}
    for cell in cells:  # those that train, to the one that draws the first picture
        if cell["cell_type"] == "code" and "CHOSEN" not in names:
            exec("".join(line for line in cell["source"] if not line.startswith("%")), names)
    figure, panels = plt.subplots(2, 2, figsize=(8, 6), layout="constrained")
    for panel, (name, (title, colour)) in zip(panels.flat, PANELS.items(), strict=True):
        weights = names["CHOSEN"][name][-1]
        said = names["draw"](panel, weights, colour)
        panel.set_title(title, fontweight="bold", fontsize=14)
        panel.set_xlabel(f"{said}; distance {names['outcome'](weights)[0]:.1f}", fontsize=14)
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=3,
        frameon=False,
        fontsize=13,
    )
    figure.savefig(DOCS / "idea.png", dpi=100)


if __name__ == "__main__":
    main()
