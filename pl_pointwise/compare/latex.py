"""The tables of a comparison for LaTeX: a file to ``\\input``, with the packages it needs named."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from .tables import Table

HEAD = r"""% \usepackage{booktabs,graphicx} in the preamble, then \input{comparison}
"""
WIDE = 5
"""Tables with more columns are made as small as the line is long."""

SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    "–": "--",
    "—": "---",
    "’": "'",
    "…": r"\ldots{}",
    "\u00a0": "~",
}
MATHEMATICS = {
    "±": r"\pm",
    "·": r"\cdot",
    "×": r"\times",
    "≤": r"\le",
    "≥": r"\ge",
    "→": r"\to",
    "−": "-",
    "∞": r"\infty",
    "²": "^2",
    "α": r"\alpha",
    "β": r"\beta",
    "γ": r"\gamma",
    "δ": r"\delta",
    "Δ": r"\Delta",
    "ε": r"\varepsilon",
    "η": r"\eta",
    "θ": r"\theta",
    "λ": r"\lambda",
    "ρ": r"\rho",
    "τ": r"\tau",
    "ψ": r"\psi",
}
"""What the usual fonts have in formulas alone."""
ESCAPES = SPECIAL | {character: f"${command}$" for character, command in MATHEMATICS.items()}
EXPONENT = re.compile(r"(?<=[\d)])e([+-]\d+)")


def escape(text: str) -> str:
    r"""Returns a text as LaTeX sets it.

    >>> print(escape("penalty_1 & 5 % of λ"), escape("(1.2 ± 0.4)e-07"), escape("-0.3"))
    penalty\_1 \& 5 \% of $\lambda$ (1.2 $\pm$ 0.4)$\times 10^{-7}$ $-$0.3
    """
    escaped = "".join(ESCAPES.get(character, character) for character in " ".join(text.split()))
    escaped = EXPONENT.sub(lambda found: rf"$\times 10^{{{int(found[1])}}}$", escaped)
    return re.sub(r"(?<![\w$.){])-(?=[\d.])", "$-$", escaped)


def latex(table: Table, label: str) -> str:
    """Returns a table as a float with its title and note as caption; texts left, the rest right."""
    names = [*map(escape, table.cells)]
    lines = [" & ".join(map(escape, line)) + r" \\" for line in table.cells.to_numpy().tolist()]
    tabular = "\n".join(
        [
            rf"\begin{{tabular}}{{@{{}}l{'r' * (len(names) - 1)}@{{}}}}",
            r"\toprule",
            " & ".join(names) + r" \\",
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )
    if len(names) > WIDE:
        tabular = f"\\resizebox{{\\linewidth}}{{!}}{{%\n{tabular}}}"
    note = escape(table.note.replace("`", ""))
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{escape(table.title)}. {note}}}",
            rf"\label{{tab:{label}}}",
            tabular,
            r"\end{table}",
            "",
        ]
    )


def write_latex(tables: Sequence[Table], path: Path) -> None:
    """Writes all tables into one file."""
    labels = [re.sub(r"\W+", "-", table.title.lower()) for table in tables]
    parts = [latex(table, label) for table, label in zip(tables, labels, strict=True)]
    path.write_text("\n".join([HEAD, *parts]), encoding="utf-8")
