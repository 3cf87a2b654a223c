"""A When2Call training step beside TRL's, on the same records: samples a second, peak of memory.

    pip install trl==1.16.0
    python benchmarks/when2call_against_trl.py MODEL RECORDS

MODEL is the folder of a causal language model whose chat template takes tools (MiniMind2-Small),
RECORDS a JSONL of the schema of nvidia/When2Call's train_pref. Contestants take turns, each run in
a process of its own, so that its peak of memory is its own; the table gives the median over rounds
and ratios to TRL's DPOTrainer. Whole trainers are timed, loaders and optimizers included, from the
start of one step to the start of the next. With the cached reference the first epoch fills it and
the second is timed, as in every epoch but the first.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

CONTESTANTS = ("trl-dpo", "ours-pointwise", "ours-pointwise-cached", "trl-simpo", "ours-simpo")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("records", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="timed, after two that are not")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--max-prompt", type=int, default=424, help="tokens; cut from the left")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=CONTESTANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.only, arguments)))
        return
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    for round_number in range(arguments.rounds):
        for name in CONTESTANTS:
            command = [sys.executable, *sys.argv, "--only", name]
            environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
            done = subprocess.run(command, check=True, capture_output=True, env=environment)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"round {round_number + 1}, {name}: {found[name][-1]}", flush=True)
    print(table(found, arguments.batch_size))


def table(found: dict[str, list[dict[str, float]]], batch_size: int) -> str:
    """Markdown: seconds a step (median, spread over rounds), samples a second, memory, ratios."""
    median = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in found.items()
    }
    lines = [
        "| | s/step (min–max) | samples/s | × TRL DPO | peak GiB | × TRL DPO |",
        "|---" * 6 + "|",
    ]
    base = median["trl-dpo"]
    for name, runs in found.items():
        seconds = [run["seconds"] for run in runs]
        own = median[name]
        lines.append(
            f"| {name} | {own['seconds']:.2f} ({min(seconds):.2f}–{max(seconds):.2f}) "
            f"| {batch_size / own['seconds']:.2f} | {base['seconds'] / own['seconds']:.2f} "
            f"| {own['gib']:.2f} | {own['gib'] / base['gib']:.2f} |"
        )
    return "\n".join(lines)


def measure(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Median seconds a step and the process's peak of memory in GiB."""
    with tempfile.TemporaryDirectory() as folder:
        run = run_trl if name.startswith("trl") else run_ours
        seconds = run(name, arguments, Path(folder))
    timed = seconds[-arguments.steps :]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"seconds": round(statistics.median(timed), 3), "gib": round(peak, 2)}


def chosen_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Records spread over the file, for two steps more than are timed."""
    lines = arguments.records.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line]
    spread = rows[:: max(1, len(rows) // (arguments.batch_size * (arguments.steps + 2)))]
    return spread[: arguments.batch_size * (arguments.steps + 2)]


def run_trl(name: str, arguments: argparse.Namespace, folder: Path) -> list[float]:
    """TRL's trainer on prompt, chosen and rejected as texts, rendered and cut as ours are."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    examples = []
    for row in chosen_rows(arguments):
        ids = tokenizer.apply_chat_template(
            row["messages"],
            tools=[json.loads(tool) for tool in row["tools"]] or None,
            add_generation_prompt=True,
            return_dict=True,
        )["input_ids"][-arguments.max_prompt :]
        sides = {side: row[f"{side}_response"]["content"] for side in ("chosen", "rejected")}
        examples.append({"prompt": tokenizer.decode(ids), **sides})
    starts: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            starts.append(time.perf_counter())

        def on_train_end(self, *_: Any, **__: Any) -> None:
            starts.append(time.perf_counter())

    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": arguments.batch_size,
        "max_steps": arguments.steps + 2,
        "bf16": True,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "learning_rate": 5e-5,
        "max_length": 2048,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, task_type="CAUSAL_LM")
    model = AutoModelForCausalLM.from_pretrained(arguments.model, use_safetensors=True)
    if name == "trl-dpo":
        from trl import DPOConfig, DPOTrainer

        config, trainer_class = DPOConfig(**settings), DPOTrainer
    else:
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        config = CPOConfig(**settings, loss_type="simpo", cpo_alpha=0.0)
        trainer_class = CPOTrainer
    trainer_class(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(examples),
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=[Clock()],
    ).train()
    return [later - earlier for earlier, later in pairwise(starts)]


def run_ours(name: str, arguments: argparse.Namespace, folder: Path) -> list[float]:
    """When2CallModule under Lightning: pointwise constraints with KL, or SimPO."""
    from lightning.pytorch import Callback, Trainer

    from pl_pointwise import Pointwise
    from pl_pointwise.tasks import When2CallDataModule, When2CallModule

    records = folder / "records.jsonl"
    records.write_text("\n".join(json.dumps(row) for row in chosen_rows(arguments)))
    cached = name.endswith("cached")
    simpo = name == "ours-simpo"
    module = When2CallModule(
        str(arguments.model),
        formulation=None if simpo else Pointwise(alpha=10.0, dual_lr=0.1),
        objective="simpo" if simpo else "kl",
        rejected_tolerance=-6.0,
        reference_cache="memory" if cached else None,
    )
    data = When2CallDataModule(
        str(arguments.model),
        source="files",
        train_file=str(records),
        val_fraction=0.0,
        max_prompt_length=arguments.max_prompt,
        batch_size=arguments.batch_size,
    )
    starts: list[float] = []

    class Clock(Callback):
        def on_train_batch_start(self, *_: Any, **__: Any) -> None:
            starts.append(time.perf_counter())

        def on_train_end(self, *_: Any, **__: Any) -> None:
            starts.append(time.perf_counter())

    trainer = Trainer(
        max_epochs=2 if cached else 1,
        accelerator="cpu",
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Clock()],
        default_root_dir=folder,
    )
    trainer.fit(module, data)
    return [later - earlier for earlier, later in pairwise(starts)]


if __name__ == "__main__":
    main()
