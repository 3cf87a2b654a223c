"""``pl-pointwise report``: a comparison's folder as one HTML page that needs nothing beside it.

Tables, plots, what the held-out data certify of each method, configurations, versions and failures.
Plots are part of the file, and it links to nothing; texts are escaped.
"""

from __future__ import annotations

import argparse
import base64
import json
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader

from .plots import PLOTS
from .runs import Outcome, Run
from .tables import tables


def main(args: Sequence[str]) -> None:
    """Runs the command."""
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
    """Returns the page for a folder that ``compare`` wrote.

    Raises:
        ValueError: there is no ``comparison.json``, or one that compare did not write.
    """
    command, outcomes = read(folder)
    done = [(run, result) for run, result in outcomes if "error" not in result]
    first_seeds = list({run.method: (run, result) for run, result in reversed(done)}.values())[::-1]
    configs = {run.method: run.folder / "config.yaml" for run, _ in first_seeds}
    versions = [
        ", ".join(f"{name} {version}" for name, version in result.get("versions", {}).items())
        for _, result in outcomes
    ]
    loader = PackageLoader("pl_pointwise.compare")
    template = Environment(loader=loader, autoescape=True).get_template("report.html.jinja")
    return template.render(
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
        first_seeds=first_seeds,
        configurations=[
            (method, path.read_text(encoding="utf-8"))
            for method, path in configs.items()
            if path.is_file()
        ],
        versions=list(dict.fromkeys(filter(None, versions))),
    )


def _answer(path: Path) -> list[str]:
    """Returns the paragraphs of the answer to a requirement, none if nothing was required."""
    if not path.is_file():
        return []
    statement: str = json.loads(path.read_text(encoding="utf-8"))["statement"]
    return [line for line in statement.splitlines() if line]


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
            run = Run(entry["method"], entry["seed"], below, [], result.get("digest", ""))
            outcomes.append((run, result))
        return record["command"], outcomes
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is not what pl-pointwise compare writes ({type(error).__name__}: {error}): "
            "run compare again; finished runs are kept."
        ) from error
