"""The hardest samples as a page to read."""

from __future__ import annotations

from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
th, td { border-bottom: 1px solid #ccc; padding: .5rem; text-align: left; vertical-align: top }
td.number { font-variant-numeric: tabular-nums; text-align: right; white-space: nowrap }
th.number { text-align: right }
dl { margin: 0 } dt { color: #555; font-size: .85em }
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
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>Hardest samples</title><style>{_STYLE}</style></head><body>",
        "<h1>Hardest samples</h1><p>The largest mean violations v̄ over the visits in training, "
        "the first left out: inputs that resist their constraint. Look for wrong labels and "
        "outliers. v is the violation at the last visit (≤ 0 is satisfied), λ the multiplier, u* "
        "the relaxation. Of a sample with several "
        "values the hardest is named, and its text marked ←.</p>",
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
    value = row["value"]
    sample = str(row["index"])
    if value["of"] > 1:
        sample += f", value {value['number']} of {value['of']}"
    if value["bound"] is not None:
        sample += f", {value['bound']}"
    fields = {"training sample": sample}
    for name, text in row["text"].items():
        # The tasks number the texts of a vector-valued constraint: "negative 3" is value 3's.
        culprit = value["of"] > 1 and name.endswith(f" {value['number']}")
        fields[f"{name} ←" if culprit else name] = text
    texts = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in fields.items())
    return f"<tr>{cells}<td><dl>{texts}</dl></td></tr>"
