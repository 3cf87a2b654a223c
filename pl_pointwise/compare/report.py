"""``pl-pointwise report``: a comparison's folder as one HTML page that needs nothing beside it.

Tables, plots, what the held-out data certify of each run, configurations, versions and failures.
Plots are part of the file, and it links to nothing but its own parts and the runs' folders; texts
are escaped. One script sorts tables; the page's content policy lets no other run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

from ..cli_errors import CommandParser
from .plots import PLOTS
from .runs import Outcome, Run
from .tables import tables

PAGE = "report.html"


def main(args: Sequence[str]) -> None:
    """Runs the command."""
    parser = CommandParser("report", __doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="what compare was given as --output")
    parser.add_argument("--output", type=Path, help="the page; default: report.html in the folder")
    known = parser.parse_args(list(args))
    path = known.output or known.folder / PAGE
    try:
        page = report(known.folder, path)
    except ValueError as error:
        parser.error(str(error))
    path.write_text(page, encoding="utf-8")
    print(f"Written to {path}")


def report(folder: Path, page: Path | None = None) -> str:
    """Returns the page for a folder that ``compare`` wrote.

    page: where it will be, from where it links to the runs' folders; default: in the folder.

    Raises:
        ValueError: there is no ``comparison.json``, or one that compare did not write; a file to
            show lies elsewhere.
    """
    command, outcomes = read(folder)
    methods: dict[str, list[Outcome]] = {}
    for run, result in outcomes:
        methods.setdefault(run.method, []).append((run, result))
    configs = {method: found[0][0].folder / "config.yaml" for method, found in methods.items()}
    for name in [*configs.values(), *(folder / plot for plot in PLOTS), folder / "answer.json"]:
        _require_inside(name, folder)
    versions = [
        ", ".join(f"{name} {version}" for name, version in result.get("versions", {}).items())
        for _, result in outcomes
    ]
    loader = PackageLoader("pl_pointwise.compare")
    environment = Environment(loader=loader, autoescape=True)
    environment.filters["zip"] = zip
    environment.filters["code"] = _code
    script = (resources.files(__package__) / "templates/report.js").read_text(encoding="utf-8")
    return environment.get_template("report.html.jinja").render(
        command=command,
        answer=_answer(folder / "answer.json"),
        runs=len(outcomes),
        failed=[(run, result["error"]) for run, result in outcomes if "error" in result],
        tables=tables(outcomes),
        plots=[
            (caption, base64.b64encode((folder / name).read_bytes()).decode())
            for name, caption in PLOTS.items()
            if (folder / name).is_file()
        ],
        methods=[*methods.items()],
        anchors=_anchors(methods),
        folders={
            (run.method, run.seed): _link(run.folder, (page or folder / PAGE).parent)
            for run, _ in outcomes
        },
        configurations={
            method: path.read_text(encoding="utf-8")
            for method, path in configs.items()
            if path.is_file()
        },
        versions=list(dict.fromkeys(filter(None, versions))),
        script=Markup(script),
        script_hash=_hash(script),
    )


def _code(text: str) -> Markup:
    """Returns a text, escaped, with what stands between backticks as code."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))


def _anchors(methods: Mapping[str, Sequence[Outcome]]) -> dict[tuple[str, int | None], str]:
    """Returns the place on the page of every method, and of every run by method and seed."""
    found: dict[tuple[str, int | None], str] = {}
    for number, (method, outcomes) in enumerate(methods.items(), start=1):
        found[method, None] = f"method-{number}"
        found |= {(method, run.seed): f"method-{number}-seed-{run.seed}" for run, _ in outcomes}
    return found


def _link(folder: Path, start: Path) -> str:
    """Returns a folder as a link from another; as it is where no relative path leads to it."""
    try:
        relative = os.path.relpath(folder, start)
    except ValueError:  # Another drive.
        return folder.absolute().as_uri()
    return quote(f"./{Path(relative).as_posix()}/")


def _hash(script: str) -> str:
    """Returns what a content policy says to let this one script run, and no other."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"sha256-{digest}"


def _answer(path: Path) -> list[str]:
    """Returns the paragraphs of the answer to a requirement, none if nothing was required."""
    if not path.is_file():
        return []
    statement: str = json.loads(path.read_text(encoding="utf-8"))["statement"]
    return [line for line in statement.splitlines() if line]


def _require_inside(path: Path, folder: Path) -> None:
    """Refuses what the page would embed or link to from outside of the comparison's folder."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"{folder}: {path} leads out of the folder, which compare does not write. The page "
            "shows nothing from elsewhere."
        )


def read(folder: Path) -> tuple[str, list[Outcome]]:
    """Returns the command and the results that ``comparison.json`` holds.

    Raises:
        ValueError: there is none, or one that compare did not write.
    """
    path = folder / "comparison.json"
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist: write it with pl-pointwise compare … --output {folder}"
        )
    outcomes: list[Outcome] = []
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        for entry in record["runs"]:
            result, below = entry["result"], folder / entry["folder"]
            _require_inside(below, folder)
            run = Run(entry["method"], entry["seed"], below, [], result.get("digest", ""))
            outcomes.append((run, result))
        return record["command"], outcomes
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is not what pl-pointwise compare writes ({type(error).__name__}: {error}): "
            "run compare again; finished runs are kept."
        ) from error
