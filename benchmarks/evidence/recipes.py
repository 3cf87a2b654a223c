"""What closes the gap between training and held-out tails: one change of the training at a time.

    python -m benchmarks.evidence.recipes --models WEIGHTS --seeds 0 1

Runs every recipe of ``recipes.yaml`` on the task ``reranker-corpus``: its records, model and
splits. The validation part is for choosing (a checkpoint, a recipe), the test part for the table.
Whatever a run was trained on, it is measured in margins, at ε = 3. What is finished is not run
again.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pl_pointwise import Constraint
from pl_pointwise.callbacks import FeasibleCheckpoint
from pl_pointwise.cli import PointwiseCLI
from pl_pointwise.compare.runs import Run

from .grids import read_grid
from .study import Study, load

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "recipes.csv"
PARTS = {"val": "validation", "test": "test", "train": "train"}
METRICS = {
    "length objective": "length_objective",
    "cvar95": "relevance/cvar95",
    "violated": "relevance/violated",
    "wrong order": "wrong_order",
    "wrong probability cvar95": "wrong_probability_cvar95",
    "score std": "score_std",
    "mrr@10": "mrr@10",
}
Row = dict[str, Any]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, required=True, help="folder of weights")
    parser.add_argument("--output", type=Path, default=Path("results/recipes"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--recipes", nargs="+", help="those whose name starts so; else all")
    parser.add_argument("--time-limit", type=float, metavar="MINUTES", help="start no run after it")
    arguments = parser.parse_args(words)
    study = load("reranker-corpus", None, arguments.models, arguments.output)
    deadline = time.time() + 60 * (arguments.time_limit or 1e6)
    _prepare()
    for seed in arguments.seeds:
        for run in runs(study, seed):
            wanted = arguments.recipes is None or run.method.startswith(tuple(arguments.recipes))
            if wanted and finished(run) is None and time.time() < deadline:
                execute(run)
    print(write_csv(study))


def runs(study: Study, seed: int) -> list[Run]:
    """Every recipe at one seed, with the test part as the data to test on."""
    entries = read_grid(HERE / "recipes.yaml")
    comparison = study.comparison(entries, "tune", seed)
    held_out = Path(comparison.overrides[comparison.overrides.index(OPTION) + 1])
    test = str(held_out.with_name(held_out.name.replace("validation", "test")))
    overrides = [*comparison.overrides, "--data.init_args.test_file", test]
    return replace(comparison, overrides=overrides).runs


OPTION = "--data.init_args.val_file"


def finished(run: Run) -> list[Row] | None:
    """What a run of this very configuration found, None if there is none."""
    path = run.folder / "recipe.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found["rows"] if found.get("digest") == run.digest else None


def execute(run: Run) -> None:
    """Fits, then measures the last weights and, where there is a checkpoint, the best."""
    started = time.perf_counter()
    cli = PointwiseCLI(run.arguments, run=False)
    cli.trainer.fit(cli.model, cli.datamodule)
    seconds = time.perf_counter() - started
    # All alike from here on, in whichever unit this one was trained.
    cli.model.constrain = "margin"
    cli.model.evaluation_constraints = {"relevance": Constraint(at_least=3.0)}
    cli.trainer.limit_val_batches = 1.0
    weights: dict[str, str | None] = {"last": None}
    for callback in cli.trainer.checkpoint_callbacks:
        if isinstance(callback, FeasibleCheckpoint):
            weights["best checkpoint"] = callback.best_model_path
    rows = []
    for name, path in weights.items():
        for row in measure(cli, path):
            rows.append({"recipe": run.method, "weights": name, "seed": run.seed, **row})
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "recipe.json").write_text(
        json.dumps({"digest": run.digest, "seconds": seconds, "rows": rows}, indent=1)
    )
    for checkpoint in run.folder.rglob("*.ckpt"):
        checkpoint.unlink()
    print(f"{run.title}: {seconds:.0f} s", flush=True)
    for row in rows:
        figures = "  ".join(f"{key} {row[key]:.3f}" for key in METRICS)
        print(f"    {row['weights']:16s}{row['part']:11s}{figures}", flush=True)
    gc.collect()


def measure(cli: PointwiseCLI, path: str | None) -> list[Row]:
    """Metrics of the weights in memory, or of a checkpoint, on every part."""
    options: dict[str, Any] = {"verbose": False, "ckpt_path": path, "weights_only": True}
    cli.trainer.validate(cli.model, cli.datamodule, **options)
    found = {name: float(value) for name, value in cli.trainer.callback_metrics.items()}
    cli.trainer.test(cli.model, cli.datamodule, **options)
    found |= {name: float(value) for name, value in cli.trainer.callback_metrics.items()}
    return [
        {"part": part, **{name: found[f"{stage}/{key}"] for name, key in METRICS.items()}}
        for stage, part in PARTS.items()
    ]


def write_csv(study: Study) -> Path:
    """Writes what every finished run found."""
    found = [finished(run) or [] for seed in range(10) for run in runs(study, seed)]
    write_rows([row for of_run in found for row in of_run], RESULTS)
    return RESULTS


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Writes a line per recipe, weights, seed and part."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["recipe", "weights", "seed", "part", *METRICS])
        writer.writeheader()
        for row in rows:
            short = {key: f"{v:.5g}" if isinstance(v, float) else v for key, v in row.items()}
            writer.writerow(short)


def _prepare() -> None:
    import torch

    from pl_pointwise.compare.runner import quieten

    torch.set_num_threads(1)
    quieten()


if __name__ == "__main__":
    main()
