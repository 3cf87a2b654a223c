"""The hardest samples as a page to read."""

from __future__ import annotations

from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
th, td { border-bottom: 1px solid #8888; padding: .5rem; text-align: left; vertical-align: top }
td.number { font-variant-numeric: tabular-nums; text-align: right; white-space: nowrap }
th.number { text-align: right } td.number, th.number { width: 1% }
body { color-scheme: light dark }
dl { margin: 0 } dt { font-size: .85em; opacity: .75 }
dt.culprit, dd.culprit { border-left: 4px solid #d55e00; opacity: 1; padding-left: .5rem }
dt.culprit { color: #d55e00; font-weight: 600 }
img { background: #fff; image-rendering: pixelated; max-width: 100%; min-height: 6rem }
summary { cursor: pointer; font-size: .85em; opacity: .75 }
dd { margin: 0 0 .5rem; max-height: 12rem; overflow: auto; overflow-wrap: anywhere;
     unicode-bidi: isolate; white-space: pre-wrap }
"""


def page(rows: list[dict[str, Any]]) -> str:
    """One HTML page without anything from elsewhere, and without scripts; texts are escaped.

    rows: as :class:`HardestSamples` writes them to its JSONL file.
    """
    parts = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
        # Whatever a record says: no script runs, nothing is loaded.
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">",
        f"<title>Hardest samples</title><style>{_STYLE}</style></head><body>",
        "<h1>Hardest samples</h1><p>The largest mean violations v̄ over the visits in training, "
        "the first left out: inputs that resist their constraint. Look for wrong labels and "
        "outliers. v is the violation at the last visit (≤ 0 is satisfied), λ the multiplier, u* "
        "the relaxation. What violates most is marked ←.</p>",
    ]
    if not rows:
        parts.append("<p>No constraint with a multiplier per sample is violated.</p>")
    for name in dict.fromkeys(row["constraint"] for row in rows):
        parts.append(
            f"<h2>{escape(name)}</h2><table><thead><tr>"
            + "".join(f'<th class="number">{head}</th>' for head in ("", "v̄", "λ", "v", "u*"))
            + "<th>sample</th></tr></thead><tbody>"
        )
        parts += [_line(row) for row in rows if row["constraint"] == name]
        parts.append("</tbody></table>")
    return "\n".join([*parts, "</body></html>", ""])


def _line(row: dict[str, Any]) -> str:
    names = ("mean_violation", "multiplier", "violation", "relaxation")
    figures = [row[name] for name in names]
    shown = [row["rank"], *("–" if figure is None else f"{figure:.3g}" for figure in figures)]
    cells = "".join(f'<td class="number">{number}</td>' for number in shown)
    value, guilty = row["value"], row.get("culprit")
    sample = str(row["index"])
    if value["of"] > 1:
        sample += f", value {value['number']} of {value['of']}"
    if value["bound"] is not None:
        sample += f", {value['bound']}"
    open_fields = [_field("training sample", escape(sample))]
    folded: list[str] = []
    kind = None if guilty is None else _kind(guilty)
    for name, text in row["text"].items():
        uri = row.get("images", {}).get(name)
        content = escape(text) if uri is None else f'<img alt="{escape(text)}" src="{uri}">'
        same_kind = value["of"] > 1 and _kind(name) == kind is not None
        if name == guilty:
            open_fields.append(_field(f"{name} ←", content, " class=culprit"))
        else:
            (folded if same_kind else open_fields).append(_field(name, content))
    fields = f"<dl>{''.join(open_fields)}</dl>"
    if folded:
        others = f"{len(folded)} other{'s' if len(folded) > 1 else ''}"
        fields += f"<details><summary>{others}</summary><dl>{''.join(folded)}</dl></details>"
    return f"<tr>{cells}<td>{fields}</td></tr>"


def _field(name: str, content: str, attribute: str = "") -> str:
    return f"<dt{attribute}>{escape(name)}</dt><dd{attribute}>{content}</dd>"


def _kind(name: str) -> str | None:
    """What is numbered, "negative" of "negative 3 (…)"; None of a field without a number."""
    start, _, number = name.partition(" (")[0].rpartition(" ")
    return start if start and number.isdecimal() else None
