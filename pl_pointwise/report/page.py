"""A run as one HTML page: no network, no script from elsewhere, texts of the data never as markup.

The page holds its samples as JSON; a script of its own shows them row by row as one scrolls, so
that ten thousand open at once.
"""

from __future__ import annotations

import base64
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..extras import MissingPackageError, needs
from ..files import write_whole
from ..printing import Table
from .closing_table import Closing
from .columns import share_text
from .plots import Plot, svg_of

log = logging.getLogger(__name__)

FILE = "report.html"
TEMPLATE = Path(__file__).parents[1] / "templates/report.html.jinja"


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
    #: by name and data set
    metrics: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
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

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters.update(
        number=number,
        share=share,
        svg=svg_of,
        data_uri=data_uri,
        cells=cells_of,
        held=has_held_out,
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    text = template.render(page=page, samples=_as_json(page.samples))
    # Half of a pair of surrogates, which texts may hold, is no UTF-8.
    write_whole(path, text.encode("utf-8", "backslashreplace").decode("utf-8"))
    return path


# In the template ---------------------------------------------------------------------------------


def number(value: float | None) -> str:
    """Four digits; nothing of None."""
    return "" if value is None or math.isnan(value) else f"{value:.4g}"


def share(violated: int | None, of: int | None, allowed: int | None = None) -> str:
    return share_text(violated, of, allowed)


def data_uri(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def cells_of(table: Table) -> list[list[str]]:
    """The lines of a table, its head first."""
    head = [str(name) for name in table.cells]
    return [head, *table.cells.astype(str).to_numpy().tolist()]


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
    if isinstance(value, float):
        return math.isfinite(value)
    return value not in (None, "", {})
