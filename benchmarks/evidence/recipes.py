"""What closes the gap between training and held-out tails, on a frozen encoder: seconds a run.

    python -m benchmarks.evidence.recipes --models WEIGHTS --seeds 0 1 2

Runs every recipe of ``recipes.yaml``, one change of the training at a time, on the task
``reranker-corpus``: its records, model and splits. The encoder is left as it is, its output at
[CLS] is computed once, and what is trained is the cross-encoder's pooler and classifier, with the
module's own objective, constraint and multipliers. The validation part chooses (a checkpoint, a
recipe), the test part is for the table. Whatever a run was trained on, it is measured in margins,
at ε = 3.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor
from torch.utils.data import DataLoader

from pl_pointwise import Constraint, Optimization, Training
from pl_pointwise.callbacks import FeasibleCheckpoint
from pl_pointwise.printing import quieten
from pl_pointwise.tasks import RerankerModule
from pl_pointwise.tasks.reranker.data import RerankerDataModule
from pl_pointwise.tasks.reranker.scoring import score

from .splits import Sizes, corpus, write_splits
from .study import STUDIES

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "recipes.csv"
PARTS = ("train", "validation", "test")
METRICS = {
    "length objective": "length_objective",
    "cvar95": "relevance/cvar95",
    "violated": "relevance/violated",
    "wrong order": "wrong_order",
    "score std": "score_std",
    "mrr@10": "mrr@10",
}
Row = dict[str, Any]
Samples = list[dict[str, Any]]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, required=True, help="folder of weights")
    parser.add_argument("--output", type=Path, default=Path("results/recipes"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--recipes", nargs="+", help="run these alone; the results have them all"
    )
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    quieten()
    described = yaml.safe_load(STUDIES["reranker-corpus"].read_text(encoding="utf-8"))
    model = str(arguments.models / described["model"])
    folder = arguments.output / "frozen"
    records = {"queries": (corpus(4), Sizes(**described["records"]["parts"]["corpus"]))}
    rows: list[Row] = []
    for seed in arguments.seeds:
        files = write_splits(records, folder / "data", seed)
        samples = {part: features(model, files[part]["queries"]) for part in PARTS}
        for name, recipe in recipes().items():
            key = json.dumps(recipe, sort_keys=True)
            path = folder / "runs" / f"{name} · {seed}.json".replace("/", "-")
            found = (
                json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            )
            if found.get("recipe") != key:
                if arguments.recipes is not None and name not in arguments.recipes:
                    continue
                started = time.perf_counter()
                found = {"recipe": key, "rows": execute(recipe, seed, model, samples)}
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(found, indent=1), encoding="utf-8")
                show(name, seed, time.perf_counter() - started, found["rows"])
            rows += [{"recipe": name, "seed": seed, **row} for row in found["rows"]]
    columns = ["recipe", "weights", "seed", "part", *METRICS]
    frame = pd.DataFrame(rows, columns=columns)
    frame.to_csv(RESULTS, index=False, float_format="%.5g")
    for part in ("validation", "test"):
        print(part, *differences(rows, part), sep="\n")


FRONT = ("ε 1", "ε 2", "pointwise", "ε 4")
"""The baseline at several tolerances: what any recipe has to beat at its own objective."""


def differences(rows: Sequence[Row], part: str) -> list[str]:
    """A line per recipe: means over seeds, and by seed what it is off the baseline's front.

    The front is interpolated at the recipe's own Λ, so that a recipe gains nothing by scores that
    are all smaller, or by a Λ that is worse.
    """
    seen = [
        row
        for row in rows
        if row["part"] == part and row["weights"] != "best checkpoint"
    ]
    by = {(row["recipe"], row["seed"]): row for row in seen}
    lines = []
    for recipe in dict.fromkeys(row["recipe"] for row in seen):
        own = {seed: row for (name, seed), row in by.items() if name == recipe}
        line = f"{recipe:42s}"
        for key in METRICS:
            line += f" {key} {np.mean([row[key] for row in own.values()]):.3f}"
        for key in ("cvar95", "violated", "wrong order"):
            line += f" | {key} off the front:"
            for seed, row in own.items():
                front = [by[name, seed] for name in FRONT if (name, seed) in by]
                points = sorted((each["length objective"], each[key]) for each in front)
                at = np.interp(row["length objective"], *np.array(points).T)
                line += f" {row[key] - at:+.3f}"
        lines.append(line)
    return lines


def recipes() -> dict[str, dict[str, Any]]:
    """Every recipe by name: the baseline with its changes."""
    described = yaml.safe_load((HERE / "recipes.yaml").read_text(encoding="utf-8"))
    baseline = described["baseline"]
    return {
        name: {**baseline, **(of or {})} for name, of in described["recipes"].items()
    }


def show(name: str, seed: int, seconds: float, rows: Sequence[Row]) -> None:
    print(f"{name} · seed {seed}: {seconds:.0f} s", flush=True)
    for row in rows:
        values = "  ".join(f"{key} {row[key]:.3f}" for key in METRICS)
        print(f"    {row['weights']:16s}{row['part']:11s}{values}", flush=True)


class FrozenReranker(RerankerModule):
    """Scores from ``features``, (B, C, width), by the pooler and the classifier alone."""

    def __init__(self, model_name: str, **options: Any) -> None:
        super().__init__(model_name, **options)
        pooler = self.model.bert.pooler
        self.model = torch.nn.Sequential(pooler.dense, torch.nn.Tanh(), self.model.dropout,
                                         self.model.classifier)  # fmt: skip

    def forward(self, batch: dict[str, Any]) -> Tensor:
        scores: Tensor = self.model(batch["features"])
        return score(scores.flatten(0, 1)).view(scores.shape[:2])


def features(model: str, file: Path) -> Samples:
    """The samples of a file: what a batch of the task holds, with the encoder's output; kept."""
    kept = file.with_suffix(".pt")
    if kept.is_file():
        return list(torch.load(kept, weights_only=True))
    settings: dict[str, Any] = {
        "max_length": 48,
        "template": "Query: {query}\nSentence: {passage}",
    }
    data = RerankerDataModule(
        source="files", test_file=str(file), negatives=4, eval_batch_size=32, model_name=model,
        **settings,
    )  # fmt: skip
    data.setup("test")
    module = RerankerModule(model, **settings).eval()
    samples: Samples = []
    for batch in data.test_dataloader()["test"]:
        lengths = batch["lengths"]
        inputs = {
            k: batch[k].flatten(0, 1)
            for k in ("input_ids", "token_type_ids")
            if k in batch
        }
        width = inputs["input_ids"].shape[1]
        mask = torch.arange(width) < lengths.flatten()[:, None]
        with torch.no_grad():
            hidden = module.model.bert(
                **inputs, attention_mask=mask.long()
            ).last_hidden_state
        first = hidden[:, 0].view(*lengths.shape, -1)
        for row, index in enumerate(batch["index"].tolist()):
            if index >= 0:
                names = ("passage_lengths", "candidates", "lengths")
                sample = {name: batch[name][row].clone() for name in names}
                samples.append({**sample, "features": first[row].clone()})
    torch.save(samples, kept)
    return samples


def execute(
    recipe: Mapping[str, Any], seed: int, model: str, samples: Mapping[str, Samples]
) -> list[Row]:
    """Fits once, and measures the last weights, or their average, and the best checkpoint's."""
    seed_everything(seed, verbose=False)
    optimization = Optimization(
        learning_rate=recipe["learning_rate"],
        weight_decay=0.0,
        schedule="linear",
        warmup_ratio=0.1,
    )
    module = FrozenReranker(
        model,
        formulation=recipe["formulation"],
        tolerance=recipe["tolerance"],
        dropout=recipe["dropout"],
        training=Training(optimization),
    )
    indexed = {p: [{**s, "index": i} for i, s in enumerate(samples[p])] for p in PARTS}
    loaders = {part: DataLoader(indexed[part], batch_size=100) for part in PARTS}
    shuffled = DataLoader(indexed["train"], batch_size=4, shuffle=True)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = FeasibleCheckpoint(dirpath=folder)
        callback: Callback = checkpoint
        if recipe["average"] is not None:
            callback = EMAWeightAveraging(decay=recipe["average"])
        trainer = Trainer(
            max_epochs=recipe["epochs"],
            accelerator="cpu",
            logger=False,
            callbacks=[callback],
            enable_checkpointing=callback is checkpoint,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(
            module, shuffled, loaders["validation"] if callback is checkpoint else None
        )
        weights = {
            "last" if callback is checkpoint else "average": dict(module.state_dict())
        }
        if callback is checkpoint:
            best = torch.load(checkpoint.best_model_path, weights_only=True)
            weights["best checkpoint"] = best["state_dict"]
        weights = {
            n: {k: v.clone() for k, v in of.items()} for n, of in weights.items()
        }
    # All alike from here on, whatever ε this one was trained at.
    module.evaluation_constraints = {"relevance": Constraint(at_least=3.0)}
    rows = []
    for name, state in weights.items():
        module.load_state_dict(state)
        found: dict[str, float] = {}
        for of in Trainer(accelerator="cpu", logger=False, enable_progress_bar=False,
                          barebones=False).test(module, loaders, verbose=False):  # fmt: skip
            found |= of
        for part in PARTS:
            values = {name: found[f"{part}/{key}"] for name, key in METRICS.items()}
            rows.append({"weights": name, "part": part, **values})
    return rows


if __name__ == "__main__":
    main()
