"""The plots of docs/penalties.md and docs/evidence.md."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pl_pointwise.compare.plots import BLUE, CYAN, GREEN, RED

if TYPE_CHECKING:
    from .statistics import Estimate
    from .study import Study

SCALES = {
    "hinge": (r"penalty hinge, weight=([\d.]+)", (RED, "v")),
    "Relaxed, linear cost": (
        r"relaxed linear, alpha=auto, dual_lr=auto, alpha_growth=auto, beta=([\d.]+)",
        (GREEN, "D"),
    ),
    "squared hinge": (r"penalty squared hinge, weight=([\d.]+)", (CYAN, ">")),
    "Relaxed, quadratic cost": (
        r"relaxed, alpha=auto, dual_lr=auto, alpha_growth=auto, beta=([\d.]+)",
        (GREEN, "s"),
    ),
}
"""By label: what names a setting with its weight, and whose colour and marker it has."""
DEFAULTS = {
    "Pointwise(), untuned": (BLUE, "o"),
    "Relaxed(price=10), untuned": (GREEN, "s"),
}


def weights(reached: Mapping[str, Sequence[float]], folder: Path) -> None:
    """Length loss and violation rates against the weight of a hinge, or β of a relaxation.

    reached: by method with setting, objective, violation rate on new inputs and in training.
    """
    figure = Figure(figsize=(6, 5.6), layout="constrained")  # Legible on a phone.
    panels = [*figure.subplots(2, 2).flat]
    dotted = {"color": BLUE, "linestyle": ":", "linewidth": 2.5}
    titles = (
        "length loss, validation",
        "violation rate, validation",
        "violation rate, training",
    )
    for place, (panel, title) in enumerate(zip(panels, titles, strict=False)):
        for label, (pattern, (colour, marker)) in SCALES.items():
            points = sorted(
                (float(match[1]), values[place])
                for name, values in reached.items()
                if (match := re.fullmatch(pattern, name))
            )
            line = "--" if label.startswith("Relaxed") else "-"
            panel.plot(
                *zip(*points, strict=True),
                line,
                color=colour,
                marker=marker,
                label=label,
            )
        default = reached["Pointwise(), untuned"][place]
        panel.axhline(default, **dotted)
        panel.set(xscale="log", xlabel="weight, or β of Relaxed", title=title)
        panel.set_ylim(0, None)
        panel.grid(alpha=0.3)
    handles = [*panel.get_legend_handles_labels()[0]]
    handles.append(
        Line2D([], [], color=BLUE, ls=":", lw=2.5, label="Pointwise(), no weight")
    )
    last = panels[-1]
    last.axis("off")
    last.legend(handles=handles, loc="center", frameon=False)
    figure.savefig(folder / "weights.png", dpi=160)


Compared: TypeAlias = "tuple[Study, str, str, str, Estimate, bool]"
"""Study, default, baseline, measure, difference, whether it stands after the correction."""


def forest(found: Sequence[Compared], folder: Path) -> None:
    """Paired differences, default minus baseline, with 95 % intervals."""
    measures = list(dict.fromkeys(measure for _, _, _, measure, _, _ in found))
    titles = list(dict.fromkeys(study.title for study, *_ in found))
    names = {
        t: sorted({b for s, _, b, *_ in found if s.title == t}, key=_short)
        for t in titles
    }
    figure = Figure(
        figsize=(6.2, 1.8 + 0.3 * sum(map(len, names.values()))), layout="constrained"
    )
    ratios = [len(names[title]) for title in titles]
    panels = figure.subplots(
        len(titles), len(measures), squeeze=False, height_ratios=ratios
    )
    for line, title in zip(panels, titles, strict=True):
        for panel, measure in zip(line, measures, strict=True):
            panel.axvline(0, color="black", linewidth=0.8)
            for study, default, baseline, of, each, strong in found:
                if (study.title, of) == (title, measure):
                    colour, marker = DEFAULTS[default]
                    panel.errorbar(
                        each.mean,
                        names[title].index(baseline)
                        + (0.15 if "Relaxed" in default else -0.15),
                        xerr=each.high - each.mean,
                        color=colour,
                        marker=marker,
                        markersize=5,
                        markerfacecolor=colour if strong else "white",
                        linewidth=1.2,
                    )
            panel.set_yticks(range(len(names[title])), [""] * len(names[title]))
            panel.invert_yaxis()
            panel.grid(alpha=0.3)
            panel.set_xlabel(f"{measure}\n← default better")
        line[0].set_yticklabels([_short(name) for name in names[title]])
        line[0].set_title(title, loc="left", fontsize="medium", fontweight="bold")
    figure.legend(
        handles=[
            *(
                Line2D([], [], color=colour, marker=marker, mfc="white", label=default)
                for default, (colour, marker) in DEFAULTS.items()
            ),
            Line2D(
                [],
                [],
                color="0.3",
                marker="o",
                label="filled: significant after correction",
            ),
        ],
        loc="outside lower center",
        ncols=2,
        frameon=False,
    )
    figure.savefig(folder / "differences.png", dpi=160)


def _short(name: str) -> str:
    """A method and its weight or level, without what else was set."""
    name = re.sub(
        r", (dual_lr|refuse|comply|epsilon)=[^,]+", "", name.removeprefix("penalty ")
    )
    return re.sub(r"^([^,]+)(.*), (weight|level|tilt)=(.+)$", r"\1 \4\2", name)
