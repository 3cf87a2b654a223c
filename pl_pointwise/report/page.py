"""A run as one HTML page: no network, no script from elsewhere, texts of the data never as markup.

The page holds its samples as JSON; a script of its own shows them row by row as one scrolls, so
that ten thousand open at once.
"""

from __future__ import annotations

import base64
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..extras import MissingPackageError, needs
from ..files import write_whole
from ..printing import Table
from .closing import Closing, RequirementRow
from .history import Curves

log = logging.getLogger(__name__)

FILE = "report.html"
TEMPLATE = Path(__file__).parents[1] / "templates/report.html.jinja"
MARGINS = 52, 10, 12, 26
"""Left, right, top and bottom of a plot, in its own units."""
SIZE = 380, 190


@dataclass(frozen=True)
class Sample:
    """A sample under one requirement, or an answer that is under none."""

    index: int
    constraint: str = ""
    bound: str = ""  #: in words
    value: float | None = None  #: in the unit of the bound, at its last visit
    violation: float | None = None
    price: float | None = None
    fields: Mapping[str, str] = field(default_factory=dict)  #: what it is, by name
    image: bytes | None = None  #: a PNG
    before: str | None = None  #: the starting model's answer
    wanted: str | None = None
    after: str | None = None
    source: str | None = None  #: its file and line
    dataset: str = ""  #: where a page has several


@dataclass(frozen=True)
class Plot:
    """A curve over the steps, or several."""

    title: str
    steps: Sequence[int]
    lines: Mapping[str, Sequence[float]]  #: by label; NaN where a step has none
    bound: float | None = None  #: a line across
    percent: bool = False


@dataclass(frozen=True)
class Picture:
    """A drawn plot of a comparison."""

    caption: str
    png: bytes


@dataclass(frozen=True)
class Page:
    """What a page shows; what is empty has no section."""

    title: str
    facts: Mapping[str, str] = field(default_factory=dict)
    warning: str = ""  #: above all else, such as that a run was too short
    closing: Closing | None = None
    plots: Sequence[Plot] = ()
    samples: Sequence[Sample] = ()
    samples_title: str = "Samples, the hardest first"
    samples_note: str = ""
    metrics: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  #: by name and data set
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    link: str = ""  #: of a drawer: the page of the run itself, relative to this one
    runs: Sequence[Page] = ()  #: a drawer for each


def write_if_possible(path: Path, page: Callable[[], Page]) -> Path | None:
    """Writes a page, or says in one line why there is none: a run that is done does not fail by it.

    page: makes it, which may call code of the user's own, such as ``describe``.
    """
    try:
        return write_page(path, page())
    except MissingPackageError as error:
        log.warning("%s", error)
    except Exception as error:
        log.warning("%s was not written: %s: %s", path, type(error).__name__, error)
        log.debug("The page of a run", exc_info=True)
    return None


def write_page(path: Path, page: Page) -> Path:
    """Writes the page; completely or not at all."""
    with needs("compare", "report.html"):
        from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters.update(
        number=number, share=share, svg=svg_of, data_uri=data_uri, cells=cells_of, held=has_held_out
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    text = template.render(page=page, samples=_as_json(page.samples))
    # Half of a pair of surrogates, which texts may hold, is no UTF-8.
    write_whole(path, text.encode("utf-8", "backslashreplace").decode("utf-8"))
    return path


def plots_of(
    curves: Curves, rows: Iterable[RequirementRow], bounds: Mapping[str, Any]
) -> list[Plot]:
    """The objective, and of every requirement that applied what is violated, the worst, and λ.

    bounds: the constraints by name, to draw violations in the unit of the bound.
    """
    plots = [Plot("objective", curves.steps, {"objective": curves.objective})]
    for row in rows:
        if not row.of:
            continue
        name, constraint = row.name, bounds[row.name]
        worst = [
            constraint.value_at(v) if math.isfinite(v) else math.nan for v in curves.worst[name]
        ]
        plots += [
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
            plots.append(Plot(f"{name}: mean λ", curves.steps, {"λ": curves.multiplier[name]}))
    return plots


# In the template ---------------------------------------------------------------------------------


def number(value: float | None) -> str:
    """Four digits; nothing of None."""
    return "" if value is None or math.isnan(value) else f"{value:.4g}"


def share(violated: int | None, of: int | None) -> str:
    return "" if violated is None or of is None else f"{violated:,} of {of:,}"


def data_uri(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def cells_of(table: Table) -> list[list[str]]:
    """The lines of a table, its head first."""
    return [[str(name) for name in table.cells], *table.cells.astype(str).to_numpy().tolist()]


def has_held_out(closing: Closing) -> bool:
    return any(row.held_of for row in closing.rows)


def _as_json(samples: Sequence[Sample]) -> str:
    """For a script element: no text in it can end that."""
    rows = []
    for sample in samples:
        row = {key: value for key, value in vars(sample).items() if _is_known(value)}
        if sample.image is not None:
            row["image"] = data_uri(sample.image)
        rows.append(row)
    text = json.dumps(rows, ensure_ascii=False, allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _is_known(value: Any) -> bool:
    """Whether a script can show it: JSON has no number that is not finite."""
    return not (value in (None, "", {}) or (isinstance(value, float) and not math.isfinite(value)))


# Plots -------------------------------------------------------------------------------------------


def svg_of(plot: Plot) -> Any:
    """A plot as SVG, with axes and its values for the script that shows them under the pointer."""
    from markupsafe import Markup, escape

    width, height = SIZE
    left, right, top, bottom = MARGINS
    values = [v for line in plot.lines.values() for v in line if math.isfinite(v)]
    if not values or not plot.steps:
        return Markup("")
    marked = [] if plot.bound is None else [plot.bound]
    low, high = min([*values, *marked]), max([*values, *marked])
    if plot.percent:
        low, high = 0.0, max(high, 0.01)
    ticks = _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    last = max(plot.steps[-1], 1)
    x = [left + (width - left - right) * step / last for step in plot.steps]
    scale = (height - top - bottom) / (high - low)
    up = [height - bottom - (tick - low) * scale for tick in ticks]

    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(plot.title)}" '
        f'data-plot="{escape(json.dumps(_points(plot, x, low, scale)))}">'
    ]
    for tick, y in zip(ticks, up, strict=True):
        label = f"{100 * tick:g} %" if plot.percent else f"{tick:g}"
        parts.append(
            f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" class="left">{label}</text>')
    for step, anchor in ((0, "middle"), (last // 2, "middle"), (last, "end")):
        at = left + (width - left - right) * step / last
        label = f"step {step:,}" if step == last else f"{step:,}"
        parts.append(f'<text x="{at:.1f}" y="{height - 8}" text-anchor="{anchor}">{label}</text>')
    if plot.bound is not None:
        y = height - bottom - (plot.bound - low) * scale
        parts.append(
            f'<line class="bound" x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
    for which, line in enumerate(plot.lines.values()):
        path = _path(x, [height - bottom - (v - low) * scale for v in line])
        parts.append(f'<path class="line line{which}" d="{path}"/>')
    parts.append('<line class="pointer" y1="0" y2="0" x1="0" x2="0"/></svg>')
    return Markup("".join(parts))  # Numbers of our own, and texts that were escaped.


def _points(plot: Plot, x: Sequence[float], low: float, scale: float) -> dict[str, Any]:
    lines = {
        name: [None if not math.isfinite(v) else float(f"{v:.4g}") for v in line]
        for name, line in plot.lines.items()
    }
    places = [round(at, 1) for at in x]
    return {"steps": list(plot.steps), "x": places, "lines": lines, "percent": plot.percent}


def _path(x: Sequence[float], y: Sequence[float]) -> str:
    """Of an SVG; a step without a sample of the term has no point, and the line goes on."""
    known = [(across, up) for across, up in zip(x, y, strict=True) if math.isfinite(up)]
    words = [f"{'L' if n else 'M'}{across:.1f} {up:.1f}" for n, (across, up) in enumerate(known)]
    if len(words) == 1:  # A single point: a short line, or nothing would be seen.
        words.append("l3 0")
    return "".join(words)


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers around a range."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw)
    first = math.floor(low / step)
    count = math.ceil(high / step) - first
    return [round((first + n) * step, 12) for n in range(count + 1)]
