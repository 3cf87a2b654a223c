"""Draws docs/idea.png: three models of notebooks/the_idea.ipynb beside each other.

python docs/draw_idea.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from pl_pointwise.compare.plots import BLUE, ORANGE, PURPLE

DOCS = Path(__file__).resolve().parent
PANELS = {
    "average": ("a constraint on the average", ORANGE),
    "large penalty": ("a linear penalty, weight 50", PURPLE),
    "pointwise": ("a constraint on every sample", BLUE),
}


def main() -> None:
    cells = json.loads((DOCS.parent / "notebooks/the_idea.ipynb").read_text("utf-8"))["cells"]
    names: dict = {}
    for cell in cells:  # those that train, to the one that draws the first picture
        if cell["cell_type"] == "code" and "CHOSEN" not in names:
            exec("".join(line for line in cell["source"] if not line.startswith("%")), names)
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    for panel, (name, (title, colour)) in zip(panels, PANELS.items(), strict=True):
        weights = names["CHOSEN"][name][-1]
        said = names["draw"](panel, weights, colour).replace("every bar is", "every bar")
        distance = names["outcome"](weights)[0]
        panel.set_title(title, color=colour, fontweight="bold", fontsize=12)
        panel.set_xlabel(f"{said}\ndistance from the old model: {distance:.1f}", fontsize=12)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False
    )
    figure.savefig(DOCS / "idea.png", dpi=100)


if __name__ == "__main__":
    main()
