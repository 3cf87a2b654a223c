"""``pl-pointwise report``: a comparison's folder as one HTML page that needs nothing beside it.

Tables, pictures, what the held-out data certify of each method, configurations, versions and
failures. Pictures are part of the file, and it links to nothing; texts are escaped.
"""

from __future__ import annotations

import argparse
import base64
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from .plot_data import PICTURES
from .runs import Run
from .tables import Outcome, Table, tables

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
img { max-width: 100%; height: auto }
figure { margin: 1.5rem 0 }
figcaption, .note { color: #444 }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: 0.85rem }
th, td { padding: 0.25rem 0.6rem; border-bottom: 1px solid #ccc; text-align: left;
  white-space: nowrap }
td:first-child, th:first-child { position: sticky; left: 0; background: white }
pre { background: #f4f4f4; padding: 0.8rem; white-space: pre-wrap; font-size: 0.85rem }
"""


def main(args: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="pl-pointwise report", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="what compare was given as --output")
    parser.add_argument("--output", type=Path, help="the page; default: report.html in the folder")
    known = parser.parse_args(list(args))
    path = known.output or known.folder / "report.html"
    try:
        page = report(known.folder)
    except ValueError as error:
        parser.error(str(error))
    path.write_text(page, encoding="utf-8")
    print(f"Written to {path}")


def report(folder: Path) -> str:
    """The page for a folder that ``compare`` wrote.

    Raises:
        ValueError: there is no ``comparison.json``, or one that compare did not write.
    """
    command, outcomes = read(folder)
    parts = ["<h1>Comparison</h1>", f"<pre>{escape(command)}</pre>", *_failures(outcomes)]
    found = tables(outcomes)
    parts += [_table(table) for table in found[:1]]
    for name, caption in PICTURES.items():
        if (folder / name).is_file():
            data = base64.b64encode((folder / name).read_bytes()).decode()
            parts.append(
                f'<figure><img alt="{escape(caption)}" src="data:image/png;base64,{data}">'
                f"<figcaption>{escape(caption)}</figcaption></figure>"
            )
    parts += [_table(table) for table in found[1:]]
    parts += _statements(outcomes)
    parts += _configurations(outcomes)
    parts += _versions(outcomes)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        # Should a text ever get through unescaped, it runs nothing and loads nothing.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "img-src data:; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>Comparison</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def read(folder: Path) -> tuple[str, list[Outcome]]:
    """The command and the results that ``comparison.json`` holds.

    Raises:
        ValueError: there is none, or one that compare did not write.
    """
    path = folder / "comparison.json"
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist: write it with pl-pointwise compare … --output {folder}"
        )
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return record["command"], [
            (
                Run(
                    entry["row"],
                    entry["seed"],
                    folder / entry["folder"],
                    [],
                    {},
                    entry["result"].get("digest", ""),
                ),
                entry["result"],
            )
            for entry in record["runs"]
        ]
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is not what pl-pointwise compare writes ({type(error).__name__}: {error}): "
            "run compare again; finished runs are kept."
        ) from error


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n"
        for row in table.rows
    )
    return (
        f'<h2>{escape(table.title)}</h2>\n<p class="note">{escape(table.note)}</p>\n'
        f'<div class="scroll"><table>\n<tr>{head}</tr>\n{body}</table></div>'
    )


def _failures(outcomes: Sequence[Outcome]) -> Iterable[str]:
    failed = [(run, result["error"]) for run, result in outcomes if "error" in result]
    if failed:
        yield f"<h2>Failures</h2>\n<p>{len(failed)} of {len(outcomes)} runs have no figures.</p>"
    for run, error in failed:
        yield f"<p>{escape(_title(run))}</p><pre>{escape(error)}</pre>"


def _statements(outcomes: Sequence[Outcome]) -> Iterable[str]:
    yield "<h2>What the held-out data certify</h2>"
    yield '<p class="note">Of the first seed of every method, one statement at a time.</p>'
    for run, result in _first_of_each_row(outcomes):
        for constraint, certificate in result.get("certificates", {}).items():
            text = certificate.get("statement") or f"Nothing: {certificate['error']}"
            yield f"<h3>{escape(_title(run))} · {escape(constraint)}</h3><p>{escape(text)}</p>"


def _configurations(outcomes: Sequence[Outcome]) -> Iterable[str]:
    yield "<h2>Configurations</h2>"
    for run, _ in _first_of_each_row(outcomes):
        path = run.folder / "config.yaml"
        if path.is_file():
            text = escape(path.read_text(encoding="utf-8"))
            yield f"<details><summary>{escape(run.row)}</summary><pre>{text}</pre></details>"


def _versions(outcomes: Sequence[Outcome]) -> Iterable[str]:
    yield "<h2>Versions</h2>"
    found = {tuple(result.get("versions", {}).items()): None for _, result in outcomes}
    for versions in filter(None, found):
        line = ", ".join(f"{name} {version}" for name, version in versions)
        yield f"<p>{escape(line)}</p>"


def _first_of_each_row(outcomes: Sequence[Outcome]) -> Iterable[Outcome]:
    """The first seed that did not fail, of every row that has one."""
    seen: set[str] = set()
    for run, result in outcomes:
        if "error" not in result and run.row not in seen:
            seen.add(run.row)
            yield run, result


def _title(run: Run) -> str:
    return f"{run.row} · seed {run.seed}"
