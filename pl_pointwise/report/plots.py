"""Curves over the steps of a run, drawn as SVG."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from .closing_table import RequirementRow
from .history import Curves

LEFT, RIGHT, TOP, BOTTOM = 52, 10, 12, 26
"""Margins of a plot, in its own units."""
WIDTH, HEIGHT = 380, 190


@dataclass(frozen=True)
class Plot:
    """A curve over the steps, or several."""

    title: str
    steps: Sequence[int]
    lines: Mapping[str, Sequence[float]]  #: by label; NaN where a step has none
    bound: float | None = None  #: a line across
    percent: bool = False


def plots_of(
    curves: Curves, rows: Iterable[RequirementRow], bounds: Mapping[str, Any]
) -> list[Plot]:
    """The objective, and of every requirement that applied what is violated, the worst, and λ.

    bounds: the constraints by name, to draw violations in the unit of the bound.
    """
    plots = [Plot("objective", curves.steps, {"objective": curves.objective})]
    for row in rows:
        if row.of:
            plots += _plots_of_requirement(row.name, curves, bounds[row.name])
    return plots


def _plots_of_requirement(name: str, curves: Curves, constraint: Any) -> list[Plot]:
    worst = []
    for violation in curves.worst[name]:
        # −∞ where no sample of the steps was under it.
        known = math.isfinite(violation)
        worst.append(constraint.value_at(violation) if known else math.nan)
    plots = [
        Plot(
            f"{name}: samples violated",
            curves.steps,
            {"violated": curves.violated[name]},
            percent=True,
        ),
        Plot(
            f"{name}: worst of a step's samples",
            curves.steps,
            {"worst": worst},
            bound=constraint.value_at(0.0),
        ),
    ]
    if any(value > 0 for value in curves.multiplier[name]):
        plots.append(
            Plot(f"{name}: mean λ", curves.steps, {"λ": curves.multiplier[name]})
        )
    return plots


def svg_of(plot: Plot) -> Any:
    """A plot as SVG, with axes and its values for the script that shows them under the pointer."""
    from markupsafe import Markup, escape

    axes = _axes_of(plot)
    if axes is None:
        return Markup("")
    points = json.dumps(_points(plot, axes))
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(plot.title)}" '
        f'data-plot="{escape(points)}">'
    ]
    for tick in axes.ticks:
        label = f"{100 * tick:g} %" if plot.percent else f"{tick:g}"
        parts.append(_across("grid", axes.y(tick)))
        parts.append(
            f'<text x="{LEFT - 6}" y="{axes.y(tick) + 4:.1f}" class="left">{label}</text>'
        )
    for step, anchor in ((0, "middle"), (axes.last // 2, "middle"), (axes.last, "end")):
        label = f"step {step:,}" if step == axes.last else f"{step:,}"
        parts.append(
            f'<text x="{axes.x(step):.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{label}</text>'
        )
    if plot.bound is not None:
        parts.append(_across("bound", axes.y(plot.bound)))
    x = [axes.x(step) for step in plot.steps]
    for number, line in enumerate(plot.lines.values()):
        path = _path(x, [axes.y(value) for value in line])
        parts.append(f'<path class="line line{number}" d="{path}"/>')
    parts.append('<line class="pointer" y1="0" y2="0" x1="0" x2="0"/></svg>')
    return Markup("".join(parts))  # Numbers of our own, and texts that were escaped.


@dataclass(frozen=True)
class _Axes:
    """From steps and values to the units of the drawing."""

    last: int  #: the step at the right end
    low: float  #: the value at the bottom
    scale: float  #: units of the drawing for one of a value
    ticks: list[float]

    def x(self, step: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / self.last

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low) * self.scale


def _axes_of(plot: Plot) -> _Axes | None:
    """None where a plot has nothing to draw."""
    values = [
        value
        for value in chain.from_iterable(plot.lines.values())
        if math.isfinite(value)
    ]
    if not values or not plot.steps:
        return None
    if plot.bound is not None:
        values.append(plot.bound)
    low = min(values)
    high = max(values)
    if plot.percent:  # From nothing, and so high that one percent is seen.
        low = 0.0
        high = max(high, 0.01)
    ticks = _ticks(low, high)
    low = min(low, ticks[0])
    high = max(high, ticks[-1])
    return _Axes(
        last=max(plot.steps[-1], 1),
        low=low,
        scale=(HEIGHT - TOP - BOTTOM) / (high - low),
        ticks=ticks,
    )


def _across(kind: str, y: float) -> str:
    """A line from the left to the right."""
    return f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _points(plot: Plot, axes: _Axes) -> dict[str, Any]:
    """What the script reads."""
    lines = {}
    for name, line in plot.lines.items():
        lines[name] = [
            float(f"{value:.4g}") if math.isfinite(value) else None for value in line
        ]
    return {
        "steps": list(plot.steps),
        "x": [round(axes.x(step), 1) for step in plot.steps],
        "lines": lines,
        "percent": plot.percent,
    }


def _path(x: Sequence[float], y: Sequence[float]) -> str:
    """Of an SVG; a step without a sample of the term has no point, and the line goes on."""
    words: list[str] = []
    for across, up in zip(x, y, strict=True):
        if math.isfinite(up):
            words.append(f"{'L' if words else 'M'}{across:.1f} {up:.1f}")
    if len(words) == 1:  # A single point: a short line, or nothing would be seen.
        words.append("l3 0")
    return "".join(words)


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers around a range."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(
        factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw
    )
    first = math.floor(low / step)
    count = math.ceil(high / step) - first
    return [round((first + n) * step, 12) for n in range(count + 1)]
