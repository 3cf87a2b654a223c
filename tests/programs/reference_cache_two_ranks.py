"""A fit on two ranks, the reference kept in a folder; run as a rank by safety/test_ranks.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy

from pl_pointwise import Pointwise
from pl_pointwise.tasks import Lora, Policy, SafetyDataModule, SafetyModule
from pl_pointwise.tasks.language_model.reference import ReferenceCache

EPOCHS = 3


class Watch(Callback):
    """Keeps states exactly, notes the reports, and compares what is kept with what is fresh."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reports: list[dict[str, float]] = []
        self.error, self.compared = 0.0, 0

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.scorer.cache = ReferenceCache(pl_module.model, self.folder, dtype=torch.float32)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.current_epoch:  # What the epoch before ended with.
            self.note(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.note(trainer)

    def note(self, trainer: Trainer) -> None:
        found = trainer.callback_metrics.items()
        self.reports.append({n: float(v) for n, v in found if n.startswith("reference_cache/")})

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.current_epoch == 0:
            return
        cache, scorer = pl_module.scorer.cache, pl_module.scorer
        counts = cache.hits, cache.misses
        with torch.no_grad():
            kept = pl_module(batch).reference_log_likelihood
            scorer.cache = None
            fresh = pl_module(batch).reference_log_likelihood
        scorer.cache = cache
        cache.hits, cache.misses = counts
        if fresh is None:  # An unsafe prompt, for which no reference is asked.
            return
        self.error = max(self.error, float((kept - fresh).abs().max()))
        self.compared += int((fresh != 0).sum())


def main() -> None:
    model, files, root = sys.argv[1:]
    torch.set_num_threads(1)
    seed_everything(0)
    module = SafetyModule(
        Policy(model, lora=Lora(lora_dropout=0.0)),
        formulation=Pointwise(alpha=1.0, dual_lr=0.5),
    )
    data = SafetyDataModule(
        source="files", unsafe_schema="labelled", batch_size=1, eval_batch_size=2,
        **json.loads(files),
    )  # fmt: skip
    watch = Watch(Path(root) / "cache")
    trainer = Trainer(
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=EPOCHS,
        accelerator="cpu",
        callbacks=[watch],
        default_root_dir=root,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    found = {
        "reports": watch.reports,
        "error": watch.error,
        "compared": watch.compared,
        "bytes": module.scorer.cache.bytes,
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "files": sorted(path.name for path in watch.folder.rglob("*.safetensors")),
    }
    Path(root, f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
