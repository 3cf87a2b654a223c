"""What one training step crosses, and a comparison: project files and functions, by a trace.

    python -m benchmarks.walk

Steps on the CPU: README's toy, the same in a plain loop, re-ranking, When2Call and a conversation
of three roles, on models of random weights that the tests make. Each is of the second epoch, behind
the first checks, and measures no unit of λ. Counted is what runs between the start and the end of
``training_step``, or in a plain loop of the call and of ``step()``; and all of ``compare
--require`` on the digits, of two epochs, without its plots: files of this project, their functions,
calls of these, and how often one call leads from a file into another. Properties are functions;
lambdas and comprehensions are read with the function around them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Trainer
from torch.utils.data import default_collate

from pl_pointwise import (
    Constraint,
    Optimization,
    Pointwise,
    PointwiseDataModule,
    PointwiseLoss,
    PointwiseModule,
    Training,
)

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = tuple(f"{ROOT / name}/" for name in ("pl_pointwise", "tasks", "callbacks"))


class SmallWeights(PointwiseModule):
    """README's toy."""

    def __init__(self) -> None:
        super().__init__(
            formulation=Pointwise(),
            constraints={"fit": Constraint(at_most=0.1)},
            training=Training(Optimization(learning_rate=0.1, schedule="linear")),
        )
        self.weights = torch.nn.Parameter(torch.zeros(3))

    def forward(self, batch: Any) -> Any:
        return batch["x"] @ self.weights

    def objective(self, outputs: Any, batch: Any) -> Any:
        return self.weights.square().sum().expand(len(outputs))

    def constraint_values(self, outputs: Any, batch: Any) -> Any:
        return {"fit": (outputs - batch["y"]).abs()}


class Points(PointwiseDataModule):
    def setup(self, stage: str) -> None:
        x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
        y = x @ torch.tensor([1.0, -2.0, 0.5])
        self.datasets = {"train": [{"x": x[i], "y": y[i]} for i in range(40)]}

    def collate(self, rows: list[dict[str, Any]]) -> Any:
        return default_collate(rows)


def toy(folder: Path) -> tuple[Any, Any]:
    return SmallWeights(), Points(batch_size=4)


def reranking(folder: Path) -> tuple[Any, Any]:
    from pl_pointwise.tasks import RerankerDataModule, RerankerModule
    from tests.tasks.conftest import write_rows
    from tests.tasks.reranker.conftest import ms_marco_rows, save_tiny_cross_encoder

    model = str(save_tiny_cross_encoder(folder))
    file = write_rows(folder / "train.jsonl", ms_marco_rows(24))
    options: dict[str, Any] = {"negatives": 3, "batch_size": 2}
    data = RerankerDataModule(model, source="files", train_file=str(file), **options)
    return RerankerModule(model, max_length=48, formulation=Pointwise()), data


def when2call(folder: Path) -> tuple[Any, Any]:
    from pl_pointwise.tasks import Policy, When2CallDataModule, When2CallModule
    from tests.tasks.conftest import build_model, build_tokenizer, write_rows
    from tests.tasks.when2call.conftest import preference_rows

    tokenizer = build_tokenizer()
    build_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = write_rows(folder / "train.jsonl", preference_rows(16))
    data = When2CallDataModule(None, source="files", train_file=str(file), batch_size=2)
    return When2CallModule(Policy(str(folder)), formulation=Pointwise()), data


def conversation(folder: Path) -> tuple[Any, Any]:
    from tests.tasks.conftest import save_llama
    from tests.tasks.conversation.conftest import (
        conversation_rows,
        data_of,
        made,
        written,
    )

    model = save_llama(folder)
    file = written(folder, conversation_rows(4))
    return made(model, formulation=Pointwise()), data_of(file)


STEPS: dict[str, Callable[[Path], tuple[Any, Any]]] = {
    "README's toy": toy,
    "re-ranking": reranking,
    "When2Call": when2call,
    "conversation": conversation,
}


class Walk:
    """The project's functions that are called, and the changes from one file to another."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self.changes = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if code is None or code.co_filename is None:  # At the end of the interpreter.
            return
        # Comprehensions, lambdas and bodies of classes are read with the function around them.
        if (
            event != "call"
            or not code.co_filename.startswith(FOLDERS)
            or "<" in code.co_name
        ):
            return
        self.calls[code] += 1
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(FOLDERS):
            caller = caller.f_back
        self.changes += (
            caller is not None and caller.f_code.co_filename != code.co_filename
        )

    def functions_by_file(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for code in self.calls:
            name = str(Path(code.co_filename).relative_to(ROOT))
            found.setdefault(name, []).append(
                getattr(code, "co_qualname", code.co_name)
            )
        return {name: sorted(found[name]) for name in sorted(found)}


def walk_of(make: Callable[[Path], tuple[Any, Any]]) -> Walk:
    """Fits until the counted step, and traces this one."""
    walk = Walk()
    with tempfile.TemporaryDirectory() as folder:
        module, data = make(Path(folder))
        step = module.training_step

        def traced(batch: Any, batch_idx: int) -> Any:
            units = bin(module.global_step).count("1") == 1  # Step 1, 2, 4, 8, …
            if module.current_epoch and batch_idx and not units and not walk.calls:
                sys.setprofile(walk)
            try:
                return step(batch, batch_idx)
            finally:
                sys.setprofile(None)

        module.training_step = traced
        quiet = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
        }
        options: dict[str, Any] = {
            **quiet,
            "enable_model_summary": False,
            "accelerator": "cpu",
        }
        options |= {"max_epochs": 2, "default_root_dir": folder}
        Trainer(num_sanity_val_steps=0, **options).fit(module, data)
    return walk


def walk_of_a_plain_loop() -> Walk:
    """One step of README's toy in a loop of one's own: the call of the loss, and ``step()``."""
    walk = Walk()
    task, data = SmallWeights(), Points(batch_size=4)
    data.setup("fit")
    bounds = {"fit": Constraint(at_most=0.1)}
    loss = PointwiseLoss(bounds, Pointwise(), samples=40, parameters=task)
    optimizer = torch.optim.SGD([task.weights], lr=0.1)
    for number, batch in enumerate([*data.train_dataloader()] * 2):
        outputs = task(batch)
        values = task.constraint_values(outputs, batch)
        # Of the second epoch; not the step 1, 2, 4, 8, … of a unit.
        counted = number == 14
        sys.setprofile(walk if counted else None)
        lagrangian = loss(task.objective(outputs, batch), values, batch["index"])
        sys.setprofile(None)
        optimizer.zero_grad()
        lagrangian.backward()
        optimizer.step()
        sys.setprofile(walk if counted else None)
        loss.step()
        sys.setprofile(None)
    return walk


def walk_of_a_comparison() -> Walk:
    """``compare --require`` from its words to its answer, on the digits, without its plots."""
    from pl_pointwise.cli import main as command

    walk = Walk()
    with tempfile.TemporaryDirectory() as folder:
        words = ["compare", "--config", "digits", "--methods", "digits/methods"]
        words += [
            "--require",
            "kept: violated <= 0.9",
            "--require",
            "lost(kept) <= 0.9",
        ]
        words += ["--output", f"{folder}/out", "--trainer.max_epochs", "2"]
        words += ["--trainer.enable_progress_bar", "false", "--trainer.logger", "false"]
        uses = {"PL_POINTWISE_USES": f"{folder}/uses"}  # Not of this user's record.
        quiet = contextlib.redirect_stdout(io.StringIO())
        plots = patch("pl_pointwise.compare.command.draw_plots", lambda *_: None)
        with patch.dict(os.environ, uses), quiet, plots:
            sys.setprofile(walk)
            try:
                command(words)
            finally:
                sys.setprofile(None)
    return walk


OTHERS = {
    "a plain loop": walk_of_a_plain_loop,
    "compare --require": walk_of_a_comparison,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--names", action="store_true", help="list the functions of each file"
    )
    which = [*STEPS, *OTHERS]
    parser.add_argument("--step", choices=which, action="append", help="of these only")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    print("| of | files | functions | calls | changes of file |")
    print("|---|---|---|---|---|")
    walks = {}
    for name in arguments.step or which:
        walks[name] = OTHERS[name]() if name in OTHERS else walk_of(STEPS[name])
    for name, walk in walks.items():
        files = walk.functions_by_file()
        print(
            f"| {name} | {len(files)} | {len(walk.calls)} | {walk.calls.total()} | {walk.changes} |"
        )
    if arguments.names:
        for name, walk in walks.items():
            for file, functions in walk.functions_by_file().items():
                print(f"{name}: {file} ({len(functions)}): {', '.join(functions)}")


if __name__ == "__main__":
    main()
