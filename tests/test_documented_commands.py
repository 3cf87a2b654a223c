"""Every documented command line is one that the program takes, up to the files it names.

Of the pages, the notebooks' text, and the comments of the packaged configurations.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from pl_pointwise import cli
from pl_pointwise.cli import main
from pl_pointwise.compare import command as compare
from pl_pointwise.compare.runs import Comparison
from pl_pointwise.requirements import check, monitor, tolerances

ROOT = Path(__file__).resolve().parents[1]
TESTED_AS_A_WHOLE = "own_task.md"  # test_own_task_page.py types its commands.
PAGES = [
    ROOT / "README.md",
    *(p for p in sorted((ROOT / "docs").glob("*.md")) if p.name != TESTED_AS_A_WHOLE),
]
ELLIPSIS = "…"
PLACEHOLDERS = {"CONFIG": "reranker"}
"""A configuration of the reader's own; files and models may be any."""


def commands(text: str) -> list[str]:
    """Lines of code blocks, and code within a line, that are whole commands with arguments."""
    blocks = re.findall(r"(?s)```[^\n]*\n(.*?)```", text)
    lines = [
        line.strip()
        for block in blocks
        for line in block.replace("\\\n", " ").splitlines()
    ]
    within = re.findall(r"`([^`]+)`", re.sub(r"(?s)```.*?```", "", text))
    found = [" ".join(line.split()) for line in (*lines, *within)]
    known = (*cli.PointwiseCLI.subcommands(), *cli.COMMANDS)
    whole = re.compile(rf"pl-pointwise ({'|'.join(known)}) \S")
    return [line for line in found if whole.match(line) and ELLIPSIS not in line]


def text_of(path: Path) -> str:
    """A page; the text of a notebook; the comments of a configuration as one block of code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = [
            each
            for each in json.loads(text)["cells"]
            if each["cell_type"] == "markdown"
        ]
        return "\n\n".join("".join(each["source"]) for each in cells)
    if path.suffix == ".yaml":
        comments = re.findall(r"(?m)^#(.*)$", text)
        return "\n".join(("```", *comments, "```"))
    return text


SOURCES = (
    *PAGES,
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
    *sorted((ROOT / "tasks").rglob("*.yaml")),
)
COMMANDS = list(
    dict.fromkeys(line for path in SOURCES for line in commands(text_of(path)))
)


def test_commands_are_found() -> None:
    assert len(COMMANDS) > 50
    text = "```\npl-pointwise fit \\\n  --config a\n```\n"
    text += "`pl-pointwise\ntest --config b`, `pl-pointwise`"
    assert commands(text) == [
        "pl-pointwise fit --config a",
        "pl-pointwise test --config b",
    ]


class Enough(BaseException):
    """Ends a command behind what is tested, and is no error that commands know."""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_documented_command_is_taken(command, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        PLACEHOLDERS.get(word, word) for word in shlex.split(command, comments=True)[1:]
    ]
    if "own.npz" in words:  # The page writes it in the lines above.
        square, one = np.eye(4), np.ones((1, 4))
        bounds, equal = np.full(4, 2.0), np.linspace(-1, 1, 24)[:, None]
        np.savez("own.npz", Q=square, p=np.ones(4), A=one, G=square, h=bounds, X=equal)
    if words[0] == "lost":
        for word in words[1:3]:
            item = {"id": 1, "prompt": "?", "answer": "!", "correct": True}
            (tmp_path / word).write_text(json.dumps(item))
    taken: list[Comparison] = []
    # Command lines are read and checked.
    monkeypatch.setattr(cli.PointwiseCLI, "instantiate_classes", lambda *_: None)
    monkeypatch.setattr(compare, "check_methods", lambda *_: None)
    monkeypatch.setattr(compare, "check_requirements", lambda *_: None)
    monkeypatch.setattr(
        compare, "compare", lambda comparison, *_: taken.append(comparison)
    )
    monkeypatch.setattr(monitor, "monitor", lambda *_: [])
    monkeypatch.setattr(check, "check_models", lambda *_, **__: [])
    monkeypatch.setattr(check, "report", lambda *_: "")
    if words[0] == "compare":
        main(words)
        # The methods between them: the tests of the tasks' packaged comparisons.
        for run in (taken[0].runs[0], taken[0].runs[-1]):
            cli.PointwiseCLI(run.arguments, run=False)
    elif words[0] == "tolerances":
        asked = Mock(side_effect=Enough)  # What follows loads the model.
        monkeypatch.setattr(tolerances.PointwiseCLI, "of_data", asked)
        with pytest.raises(Enough):
            main(words)
        configs, options = asked.call_args.args
        configs = [word for config in configs for word in ("--config", config)]
        cli.PointwiseCLI([*configs, *options], run=False)
    elif words[0] in cli.COMMANDS:
        for word in words[1:]:
            if word.startswith("results/"):
                (tmp_path / word).mkdir(parents=True)
        main(words)
    else:
        if "--ckpt_path" in words:
            place = words.index("--ckpt_path")
            del words[place : place + 2]
        cli.PointwiseCLI(words[1:], run=False)
