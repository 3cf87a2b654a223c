"""Writes what commands print into the pages that show it: after the default rule has changed.

python docs/printed.py [MODEL]

Trains three minutes on one core. MODEL is the folder of the language model of docs/own_data.md;
without it that page stays as it is. Read afterwards the sentences that repeat numbers.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
DIGITS = ["fit", "--config", "digits"]
EARLY = (
    "--trainer.callbacks+ EarlyStopping --trainer.callbacks.monitor val/kept/violated"
)
EARLY += " --trainer.callbacks.patience 15"
OWN = "fit --config conversation --config conversation/pointwise --data.train_file own.jsonl"
OWN += " --data.preparation.val_fraction 0 --model.policy.model_name"


def printed(arguments: list[str], folder: Path) -> str:
    """What the command prints, run in the folder by one thread."""
    quiet = ["--trainer.enable_progress_bar", "false"]
    done = subprocess.run(
        [sys.executable, "-m", "pl_pointwise", *arguments, *quiet],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout + done.stderr


def table(output: str) -> str:
    """The table at the end of a fit, and the sentences below it, broken as on a page."""
    text = output[output.index("\nAfter ") + 1 :].partition("\n\nCurves and")[0]
    lines = [
        textwrap.fill(line, 96, subsequent_indent="  ") if line[:2] == "- " else line
        for line in text.splitlines()
    ]
    return "\n".join(line.rstrip() for line in lines)


def rewrite(page: str, pattern: str, text: str) -> None:
    """Replaces the only place of a page that the pattern finds."""
    path = ROOT / page
    before = path.read_text(encoding="utf-8")
    after, count = re.subn(pattern, lambda _: text, before, flags=re.DOTALL)
    assert count == 1, (page, pattern, count)
    path.write_text(after, encoding="utf-8")


def digits(folder: Path) -> None:
    """README and the page of a task: the table of fit, and of test."""
    fit = printed(DIGITS, folder)
    for page in ("README.md", "docs/own_task.md"):
        rewrite(page, r"After 870 steps.*?(?=\n\nCurves and)", table(fit))
    lost = re.search(r"(\d+) of 349", fit)
    assert lost is not None
    rewrite(
        "README.md",
        r"Of 349 held-out ones \d+ are",
        f"Of 349 held-out ones {lost[1]} are",
    )
    (checkpoint,) = folder.rglob("epoch=29*.ckpt")
    config = "lightning_logs/version_0/config.yaml"
    test = printed(["test", "--config", config, "--ckpt_path", str(checkpoint)], folder)
    found = re.search(r"( +test +train\n.*?In brackets: of how many\.)", test, re.S)
    assert found is not None
    lines = "\n".join(line.rstrip() for line in found[1].splitlines())
    rewrite(
        "docs/own_task.md", r" {9,}test +train\n.*?In brackets: of how many\.", lines
    )


def compared(folder: Path) -> None:
    """The two rows of the page's table that are of the default rule."""
    names = ("pointwise", "relaxed")
    methods = "".join(f"{name}: digits/{name}\n" for name in names)
    (folder / "two.yaml").write_text(methods, encoding="utf-8")
    words = "compare --config digits --methods two.yaml --seeds 0 1 2 --output results"
    printed(words.split(), folder)
    with (folder / "results/comparison.csv").open(encoding="utf-8") as file:
        runs = list(csv.DictReader(file))
    columns = ("test/kept/violated", "train/kept/violated", "train/objective")
    for name in names:
        of = [run for run in runs if run["method"] == name]
        means = [fmean(float(run[column]) for run in of) for column in columns]
        cells = " | ".join(f"{mean:.3f}" if mean else "0" for mean in means)
        rewrite(
            "docs/own_task.md",
            rf"(?<=\| {name} \| )(none|β) \|[^\n]*",
            f"{'none' if name == 'pointwise' else 'β'} | {cells} |",
        )


def stopped_early(folder: Path) -> None:
    text = table(printed([*DIGITS, *EARLY.split()], folder))
    epochs = re.search(r"in (\d+) epochs", text)
    violated = re.search(r"kept ≥ 1 +(\d+) of 898", text)
    assert epochs is not None
    assert violated is not None
    said = f"stopped after {epochs[1]} of 30 epochs with {violated[1]} of 898"
    rewrite(
        "docs/while_it_trains.md",
        r"stopped after \d+ of 30 epochs with \d+ of 898",
        said,
    )


def family(folder: Path) -> None:
    text = table(printed(["fit", "--config", "family"], folder))
    rewrite("docs/run_end.md", r"After 1,020 steps.*?(?=\n```)", text)


def own_data(folder: Path, model: str) -> None:
    page = (ROOT / "docs/own_data.md").read_text(encoding="utf-8")
    records = page.partition("```json\n")[2].partition("```")[0]
    (folder / "own.jsonl").write_text(records, encoding="utf-8")
    text = table(printed([*OWN.split(), model], folder)).partition("\n\n")[2]
    rewrite("docs/own_data.md", r" +first step +last\nobjective.*?(?=\n```)", text)


def main() -> None:
    models = [str(Path(each).resolve()) for each in sys.argv[1:]]
    for write in (digits, compared, stopped_early, family):
        with TemporaryDirectory() as folder:
            write(Path(folder))
    for model in models:
        with TemporaryDirectory() as folder:
            own_data(Path(folder), model)
    print(
        "Read again: README, own_task, own_data, run_end, while_it_trains (git diff)."
    )


if __name__ == "__main__":
    main()
