"""Pictures of violations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, told apart by most colour-blind readers."""
STYLES = ("-", "--", "-.", ":")
TITLES = {"test": "held-out", "train": "train"}


def violation_cdfs(violations: Mapping[str, Mapping[str, np.ndarray]], path: Path) -> None:
    """Writes the empirical CDF of violations, a panel per ``stage/constraint``, a curve per method.

    violations: values (n,) by ``stage/constraint`` and method; non-finite ones are left out.
    The vertical line at 0 is the constraint: what a curve lacks to 1 there is the share violated.
    """
    stages = [s for s in TITLES if any(name.startswith(f"{s}/") for name in violations)]
    constraints = list(dict.fromkeys(name.partition("/")[2] for name in violations))
    figure = Figure(
        figsize=(0.8 + 4.2 * len(stages), 0.6 + 3.4 * len(constraints)), layout="constrained"
    )
    panels = figure.subplots(
        len(constraints), len(stages), squeeze=False, sharey=True, sharex="row"
    )
    for line, constraint in enumerate(constraints):
        for column, stage in enumerate(stages):
            panel = panels[line, column]
            for number, (method, values) in enumerate(
                violations.get(f"{stage}/{constraint}", {}).items()
            ):
                ordered = np.sort(values[np.isfinite(values)])
                panel.step(
                    ordered,
                    np.arange(1, len(ordered) + 1) / max(1, len(ordered)),
                    where="post",
                    label=method,
                    color=COLOURS[number % len(COLOURS)],
                    linestyle=STYLES[number // len(COLOURS) % len(STYLES)],
                    linewidth=1.8,
                )
            panel.axvline(0, color="black", linewidth=1)
            panel.set_title(f"{constraint}, {TITLES[stage]}")
            panel.set_xlabel("violation (≤ 0 is satisfied)")
            panel.set_ylim(0, 1.01)
            panel.grid(alpha=0.3)
        panels[line, 0].set_ylabel("share of values")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(5, max(1, len(labels))))
    figure.savefig(path, dpi=150)
