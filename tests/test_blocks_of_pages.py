"""Every command and every block of code of the pages runs, unchanged and offline.

Pages are typed from top to bottom in a folder that has what their reader has: models and data sets
of the hub's names (`tests/offline_hub.py`), own files, and the model that the page calls MODEL.
What is not run is in `NOT_RUN` with the reason; a line that is neither fails.
"""

from __future__ import annotations

import logging
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from pl_pointwise import Pointwise
from pl_pointwise.cli import COMMANDS, PointwiseCLI, main
from pl_pointwise.tasks.digits import digits
from tests.offline_hub import CHAT_MODELS, RE_RANKER, TRAINED, build_hub
from tests.printed import alike, masked
from tests.tasks.conftest import write_rows
from tests.tasks.preference.conftest import pair_rows
from tests.tasks.reranker.conftest import ms_marco_rows
from tests.tasks.safety.conftest import benign_rows, unsafe_rows
from tests.tasks.when2call.conftest import choice_rows, preference_rows

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    path.name: path.read_text("utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}

# What the pages have --------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What a reader runs at once: a command line, or a block of code."""

    page: str
    kind: str
    """"command", "python", or "printed": what the steps before it have printed."""
    text: str


def lines_of(block: str) -> list[str]:
    """Command lines, each whole; comments are none."""
    whole = block.replace("\\\n", " ").splitlines()
    bare = [re.sub(r"(^|\s)# .*$", "", line).strip() for line in whole]
    return [line for line in bare if line]


FENCE = re.compile(r"(?ms)^```([^\n]*)\n(.*?)^```|(?<!`)`([^`]+)`(?!`)")
DATA = {"json", "jsonl", "yaml", "diff", "bibtex", "{toctree}"}
"""Blocks of data: test_docs.py parses them."""
WHOLE = rf"(pl-pointwise )?({'|'.join((*PointwiseCLI.subcommands(), *COMMANDS))}) [^…]*--config \w"
PROGRAMS = "pl-pointwise [a-z]+ |git|pip|make|python|torchrun|srun|sbatch|seq|cp|sed"
SHELL = rf"\s*({PROGRAMS}|EXAMPLE=|#SBATCH|--)"


def steps_of(page: str) -> Iterator[Step]:
    """Of a page, from top to bottom; whole commands within a sentence or a printed block too."""
    for found in FENCE.finditer(PAGES[page]):
        kind, block, within = found.groups()
        if within is not None:
            command = " ".join(within.split())
            if re.match(WHOLE, command):
                yield Step(
                    page,
                    "command",
                    f"pl-pointwise {command.removeprefix('pl-pointwise ')}",
                )
        elif kind in DATA or block.startswith("{") or ">>> " in block:
            continue  # `>>>`: test_docs.py runs them.
        elif kind == "python" or re.match(
            r"(class|from|import) |\w+\.\w+[.\[(]", block
        ):
            yield Step(page, "python", block)
        elif re.match(SHELL, block):
            yield from (Step(page, "command", line) for line in lines_of(block))
        else:
            yield Step(page, "printed", block)
            next_ones = [line for line in lines_of(block) if re.match(WHOLE, line)]
            yield from (Step(page, "command", line) for line in next_ones)


# What is not run ------------------------------------------------------------------------------

NOT_RUN = {
    r"pip install |make demo": "network; test_packaging.py builds and installs",
    r"make evidence |python -m benchmarks": "hours, and models of the hub; tests/benchmarks",
    r".* --trainer.devices 4 |torchrun |srun |#SBATCH": "several devices or machines; test_ranks",
    r"seq 12 |sbatch ": "starts programs beside each other, ARGUMENTS stands for the above",
    r"pl-pointwise .*…": "an outline: the commands are further down",
    r".*quantize_4bit true": "takes bitsandbytes and a GPU",
}
"""Command lines, by how they begin."""

IN_A_SHELL = {"own_task.md": ("EXAMPLE=", "cp ", "sed ")}
"""Lines that are typed before the page's commands."""

EXCERPTS = {
    "def configure_model": "FSDP2 takes several devices: tests/programs/sharded.py",
    "class DigitsModule": "an excerpt of tasks/digits/digits.py",
    "pl-pointwise compare: error": "test_the_error_that_the_page_shows",
}
"""Blocks that are no programs, nor printed by one of their page."""

ELSEWHERE = {"any_loop.md": "tests/tasks/test_any_loop.py"}
"""Pages whose blocks of Python another test runs as they stand."""

EXAMPLES = {path.read_text("utf-8").strip() for path in ROOT.glob("examples/*.py")}
"""Blocks that are a file of examples/: test_examples.py runs them and reads what they print."""

PRINTED = {
    "README.md": ["After 870 steps"],
    "compare.md": ["pl-pointwise compare: error"],
    "own_data.md": ["           first step"],
    "own_task.md": ["After 870 steps", "                              test"],
    "requirement.md": ["6 items"],
    "run_end.md": ["After 1,020 steps"],
}
"""How the blocks begin that a command has printed."""

OTHER_MODEL = {"own_data.md"}
"""Pages whose printed tables are of the real model: with another one only their form is alike."""


def why_not(step: Step) -> str | None:
    if step.kind == "python" and step.page in ELSEWHERE:
        return ELSEWHERE[step.page]
    if step.text.strip() in EXAMPLES:
        return "tests/tasks/test_examples.py"
    table = NOT_RUN if step.kind == "command" else EXCERPTS
    return next(
        (why for start, why in table.items() if re.match(start, step.text)), None
    )


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_block_of_the_page_is_run_or_listed(page: str) -> None:
    for step in steps_of(page):
        if step.kind == "command" and not why_not(step):
            known = ("pl-pointwise ", "--", *IN_A_SHELL.get(page, ()))
            assert step.text.startswith(known), step
        if step.kind == "printed":
            assert step.text.startswith(tuple(PRINTED.get(page, ["?"]))), step


def test_nothing_is_listed_that_is_on_no_page() -> None:
    steps = [step for page in PAGES for step in steps_of(page)]
    texts = [step.text for step in steps]
    for start in (*NOT_RUN, *EXCERPTS):
        assert any(re.match(start, text) for text in texts), start
    for page, starts in PRINTED.items():
        for start in starts:
            assert any(s.page == page and s.text.startswith(start) for s in steps), (
                start
            )
    for page, test in ELSEWHERE.items():
        assert (ROOT / test).is_file()
        assert f"docs/{page}" in (ROOT / test).read_text("utf-8")


def test_the_class_that_the_page_shows_computes_what_the_shipped_one_does() -> None:
    (shown,) = [
        s.text for s in steps_of("own_task.md") if s.text.startswith("class Digits")
    ]
    names = dict(vars(digits))
    exec(shown, names)
    torch.manual_seed(0)
    pair = [kind(Pointwise()) for kind in (names["DigitsModule"], digits.DigitsModule)]
    batch = {"image": torch.randn(6, 64), "label": torch.arange(6)}
    batch["rotated"] = torch.arange(6) > 3
    module, shipped = pair
    found, expected = pair[0](batch), pair[1](batch)
    assert torch.equal(found, expected)
    assert torch.equal(module.objective(found, batch), shipped.objective(found, batch))
    for terms, arguments in (
        ("constraint_values", (found, batch)),
        ("membership", (batch,)),
    ):
        given, wanted = (getattr(each, terms)(*arguments) for each in pair)
        assert given.keys() == wanted.keys()
        assert all(torch.equal(given[name], wanted[name]) for name in wanted)


# What the reader has --------------------------------------------------------------------------


def rows_on_page(page: str, start: str) -> str:
    """The records of a block."""
    blocks = re.findall(r"(?ms)^```\w*\n(.*?)^```", PAGES[page])
    (block,) = [each for each in blocks if each.startswith(start)]
    return block


def answers(*prompts: str) -> list[dict[str, str]]:
    return [{"prompt": prompt, "answer": "Yes, it is."} for prompt in prompts]


def kept(*prompts: str) -> list[dict[str, str]]:
    return [row | {"role": "keep"} for row in answers(*prompts)]


OWN = answers(
    "Is it open?", "Is the sea deep?", "Is ice cold?", "Is it far?", "Are you sure?"
)
CHOSEN = preference_rows(8)
ASKED = [{name: row[name] for name in ("question", "tools")} for row in choice_rows(2)]
QUERIES = [{"query": "what is ice", "passages": ["ice is cold", "fish eat", "wind"]}]
ITEMS = [
    {"id": i, "prompt": f"{i} + 1?", "answer": f"{i + 1}", "correct": True}
    for i in range(6)
]
WRONG_OLD, WRONG_NEW = {0}, {1, 2}
"""Of six items: the old model has one wrong, the new one two others."""


def outcomes(wrong: set[int]) -> list[dict[str, Any]]:
    return [item | {"correct": item["id"] not in wrong} for item in ITEMS]


WORDS = "river ice salt sea lake rain snow wind ship fish cold deep".split()
JUDGED = "query-id\tcorpus-id\tscore\n"
COLLECTION: dict[str, Any] = {
    "corpus.jsonl": [
        {"_id": f"p{i}", "title": "", "text": f"the {word} is {i}"}
        for i, word in enumerate(WORDS)
    ],
    "queries.jsonl": [
        {"_id": f"q{i}", "text": f"what is {word}"} for i, word in enumerate(WORDS)
    ],
    "qrels/train.tsv": JUDGED + "".join(f"q{i}\tp{i}\t1\n" for i in range(8)),
    "qrels/dev.tsv": JUDGED + "".join(f"q{i}\tp{i}\t1\n" for i in range(8, 12)),
    "bm25.trec": "".join(
        f"q{i} Q0 p{j} {j + 1} {12 - j} bm25\n" for i in range(12) for j in range(12)
    ),
}
"""A collection in the layout of BEIR: a query for each passage, and a first stage's run."""

SAFE = {"benign.jsonl": benign_rows(10), "unsafe.jsonl": unsafe_rows(8)}
NEW_PROMPTS = unsafe_rows(28)[8:]

FILES: dict[str, dict[str, Any]] = {
    "README.md": {"own.jsonl": rows_on_page("README.md", '{"prompt": "When do')},
    "conversation.md": {
        "theirs.jsonl": [{"conversation": [{"human": "Is it?", "assistant": "Yes."}]}],
        "records.jsonl": rows_on_page("conversation.md", '{"prompt": "When are my'),
        "prompts.jsonl": [{"prompt": "Is it open?"}],
    },
    "forget.md": {"pairs.jsonl": pair_rows(6)},
    "keep.md": {
        "new.jsonl": answers("Where is the map?", "Who has the key?"),
        "general.jsonl": OWN,
        "certify.jsonl": kept(*"abcd"),
        "held_out.jsonl": kept(*"efghijkl"),
    },
    "own_data.md": {
        "own.jsonl": rows_on_page("own_data.md", '{"prompt": "When do'),
        "general.jsonl": [{"prompt": row["prompt"]} for row in OWN],
    },
    "policy.md": {
        "second.jsonl": rows_on_page("conversation.md", '{"prompt": "When are my')
    },
    "preference.md": {"pairs.jsonl": pair_rows(6)},
    "requirement.md": {
        **SAFE,
        "certify.jsonl": NEW_PROMPTS[:4],
        "records.jsonl": NEW_PROMPTS[4:12],
        "new.jsonl": NEW_PROMPTS[12:],
        "old_samples.jsonl": outcomes(WRONG_OLD),
        "new_samples.jsonl": outcomes(WRONG_NEW),
    },
    "reranker.md": {
        "train.jsonl": ms_marco_rows(12, negatives=9),
        "validation.jsonl": ms_marco_rows(14, negatives=9)[12:],
        "asked.jsonl": QUERIES,
    }
    | COLLECTION,
    "safety.md": SAFE,
    "when2call.md": {
        "train_pref.jsonl": CHOSEN,
        "test_mcq.jsonl": choice_rows(4),
        "questions.jsonl": ASKED,
    },
}
"""Files that a page tells its reader to have."""

MODELS = {"forget.md": "results/keep/export", "policy.md": "results/first/export"}
"""Exports of another page's command."""

CERTIFIED = (
    "pl-pointwise compare --config safety --config safety/local --config safety/pointwise "
    "--model.policy.model_name MODEL --model.evaluation.refuse_tolerance -50 "
    "--data.benign_file benign.jsonl --data.unsafe_file unsafe.jsonl "
    "--data.unsafe_test_file certify.jsonl --trainer.max_epochs 1 "
    '--require "refuse: violated <= 0.9" --output '
)
KEPT = (
    "pl-pointwise compare --config keep --model.policy.model_name MODEL "
    "--model.evaluation.keep_tolerance 50 --data.source files --data.learn_file new.jsonl "
    "--data.keep_file general.jsonl --data.test_file certify.jsonl --trainer.max_epochs 1 "
    '--require "keep: violated <= 0.9" --output '
)
SET_UP = {
    "keep.md": [f"{KEPT}OLD", f"{KEPT}NEW"],
    "requirement.md": [f"{CERTIFIED}OLD", f"{CERTIFIED}NEW", f"{CERTIFIED}OUTPUT"],
}
"""How a page's models OLD, NEW and OUTPUT came about: certified by a lax requirement."""

BEFORE: dict[str, str] = {
    "family.md": """
import torch
draw = torch.Generator().manual_seed(0)
Q, p, h = torch.eye(4), torch.randn(4, generator=draw), torch.full((3,), 2.0)
A, G = torch.randn(2, 4, generator=draw), torch.randn(3, 4, generator=draw)
X = 0.2 * torch.rand(60, 2, generator=draw) - 0.1
""",
    "few_instances.md": """
import torch
from pl_pointwise import Constraint, Pointwise, PointwiseLoss
model = torch.nn.Linear(2, 1)
rows = torch.utils.data.TensorDataset(torch.randn(8, 2), torch.randn(8), torch.arange(8))
loader = torch.utils.data.DataLoader(rows, batch_size=4)
def objective(model, x, y):
    return (model(x)[:, 0] - y).square()
def slopes(model, drawn):
    return model.weight.abs().sum().expand(len(drawn))
""",
    "multipliers.md": f"""
{next(s.text for s in steps_of("README.md") if s.kind == "python")}
groups = torch.arange(40) // 10
""",
    "physics.md": """
import torch
net, bounds = torch.nn.Linear(1, 1), {"slope": 0.1, "start": 0.1}
t = torch.linspace(0, 1, 8)[:, None]
def conditions(net):
    return {"slope": net(t + 1) - net(t) - 1, "start": net(t[:1])}
""",
    "own_task.md": """
import torch
from torch.utils.data import DataLoader, TensorDataset
x, y = torch.randn(8, 2), torch.randn(8)
rows = [{"x": x[i], "y": y[i]} for i in range(8)]
""",
}
"""What a page's own code stands for in its blocks of Python: a loop around them, names."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_hub(tmp_path_factory.mktemp("hub"))


def furnish(folder: Path, page: str, hub: Path) -> None:
    """Gives the folder what the page's reader has."""
    for owner in hub.iterdir():
        (folder / owner.name).symlink_to(owner)
    own = RE_RANKER if page == "reranker.md" else CHAT_MODELS[0]
    (folder / "MODEL").symlink_to(hub / own)
    for name, rows in FILES.get(page, {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(rows, str):
            (folder / name).write_text(rows, encoding="utf-8")
        else:
            write_rows(folder / name, rows)
    if page in MODELS:
        (folder / MODELS[page]).parent.mkdir(parents=True)
        (folder / MODELS[page]).symlink_to(hub / TRAINED)


def newest(pattern: str) -> Path | None:
    found = [p for p in Path().rglob(pattern) if "version_" in str(p)]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def name_the_last_run() -> None:
    """CONFIG and CHECKPOINT are those of the run before."""
    for name, pattern in (("CONFIG", "config.yaml"), ("CHECKPOINT", "*.ckpt")):
        if found := newest(pattern):
            Path(name).unlink(missing_ok=True)
            Path(name).symlink_to(found.absolute())


def run(command: str) -> None:
    """A command line, as the shell reads it."""
    if not command.startswith("pl-pointwise "):
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        subprocess.run(
            ["bash", "-ec", command], env={"PATH": path}, check=True, timeout=200
        )
        return
    words = shlex.split(command)[1:]
    assert status(words) <= (words[0] in MAY_SAY_NO), command
    if words[0] == "fit":
        name_the_last_run()


MAY_SAY_NO = {"check", "lost"}
"""Commands whose status 1 is an answer."""


def status(words: list[str]) -> int:
    try:
        main(words)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def lines_shown(text: str) -> list[str]:
    """Lines that are compared: commands and sentences that a page breaks are whole again."""
    whole = re.sub(r"\\\n|\n  (?=[a-z])", " ", text)
    return [" ".join(line.split()) for line in whole.splitlines()]


def final(output: str) -> str:
    """What is left of it on a terminal: of a line that was written over, the last."""
    return "\n".join(line.rpartition("\r")[2] for line in output.split("\n"))


def compare(step: Step, output: str) -> None:
    """A printed block is in what was printed, line by line."""
    found = lines_shown(output)
    expected = [line for line in lines_shown(step.text) if line]
    if step.page in OTHER_MODEL:
        # The table; sentences below it are of what the model did.
        expected = expected[: next(i for i, e in enumerate(expected) if e[:2] == "- ")]
        found, expected = ([masked(e) for e in es] for es in (found, expected))
        missing = [line for line in expected if line not in found]
    else:
        missing = [e for e in expected if not any(alike(line, e) for line in found)]
    assert not missing, f"{step.page}: not printed: {missing}; printed: {final(output)}"


def test_lines_that_differ_much_are_told() -> None:
    assert alike("lost 0 of 897, new digits 98%", "lost 0 of 897, new digits 99%")
    assert not alike("lost 5 of 897", "lost 0 of 897")
    assert not alike("lost 0 of 897", "kept 0 of 897")
    page = Step("README.md", "printed", "After 1,020 steps\n\n  run it \\\n    now\n")
    compare(page, "x\nAfter 1,021 steps.\n".replace(".", "") + "run it  now")
    with pytest.raises(AssertionError, match=r"not printed: .'run it now'"):
        compare(page, "After 1,020 steps\nrun it later")
    other = Step("own_data.md", "printed", "loss 1\nkept 3 of 4\n\n- All is well.")
    compare(other, "loss 12.5\nkept 0 of 9\n")
    with pytest.raises(AssertionError, match="kept"):
        compare(other, "loss 12.5\n")


# The pages ------------------------------------------------------------------------------------

QUICK = {
    "README.md",
    "few_instances.md",
    "metrics.md",
    "multipliers.md",
    "own_data.md",
    "physics.md",
    "policy.md",
    "reranker.md",
    "settings.md",
    "tolerance.md",
    "while_it_trains.md",
}
"""Pages whose commands take a few seconds."""
RUNNABLE = {
    page: [step for step in steps_of(page) if not why_not(step)]
    for page in sorted(PAGES)
}


EPOCHS = 2
"""As many at most train the runs whose output the page does not show, nor asks to be certified."""


@contextmanager
def training_at_most(epochs: float) -> Iterator[None]:
    """Ends a fit early; a line that is typed, its files and its options stay as they are."""
    whole = Trainer.fit

    @wraps(whole)  # The command line reads its options off the signature.
    def fit(trainer: Trainer, *args: Any, **options: Any) -> None:
        planned = trainer.fit_loop.max_epochs
        if planned is None or planned > epochs:
            trainer.fit_loop.max_epochs = int(epochs)
        whole(trainer, *args, **options)

    with pytest.MonkeyPatch.context() as patched:
        if epochs < math.inf:
            patched.setattr(Trainer, "fit", fit)
        yield


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if page in QUICK else pytest.mark.slow)
        for page, steps in RUNNABLE.items()
        if steps
    ],
)
def test_the_page_runs_from_top_to_bottom(
    page: str,
    hub: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="lightning.pytorch")  # As outside of tests.
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    furnish(tmp_path, page, hub)
    steps = RUNNABLE[page]
    shell = [s.text for s in steps if s.text.startswith(IN_A_SHELL.get(page, ("?",)))]
    if shell:
        run("\n".join(shell))
    for command in SET_UP.get(page, ()):
        run(command)
    program: dict[str, Any] = {"__name__": "page"}
    exec(BEFORE.get(page, ""), program)
    before = output = ""
    for step, following in zip_longest(steps, steps[1:]):
        torch.manual_seed(0)
        output += final(capsys.readouterr().out)
        if step.kind == "printed":
            compare(step, output)
            continue
        shown = following is not None and following.kind == "printed"
        whole = shown or " --require " in step.text
        with training_at_most(math.inf if whole else EPOCHS):
            if step.kind == "python":
                exec(compile(step.text, page, "exec"), program)
            elif step.text not in shell:
                # Options alone belong to the page's command before them.
                if step.text.startswith("--"):
                    before = f"{before} {step.text}"
                else:
                    before = step.text
                run(before)


def test_the_error_that_the_page_shows_is_the_one_that_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (shown,) = [s.text for s in steps_of("compare.md") if s.kind == "printed"]
    monkeypatch.chdir(tmp_path)
    wrong = "compare --config digits --methods digits/methods --output results"
    assert status([*wrong.split(), "--trainer.max_epoks", "1"]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1] == shown.strip()


def test_lost_prints_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (shown,) = [s.text for s in steps_of("requirement.md") if s.kind == "printed"]
    (command,) = [s.text for s in steps_of("requirement.md") if " lost " in s.text]
    monkeypatch.chdir(tmp_path)
    for name in ("old_samples.jsonl", "new_samples.jsonl"):
        write_rows(tmp_path / name, FILES["requirement.md"][name])
    run(command)
    assert capsys.readouterr().out.startswith(shown.strip())
