"""A When2Call training step beside TRL's, on the same records: samples a second, peak of memory.

    pip install trl==1.16.0
    python benchmarks/when2call_against_trl.py MODEL RECORDS

MODEL is the folder of a causal language model whose chat template takes tools (MiniMind2-Small),
RECORDS a JSONL of the schema of nvidia/When2Call's train_pref; --random builds a Llama of random
weights with 128,256 words in its place. Whole trainers are timed, loaders and optimizers included,
from the start of one step to the start of the next. With the cached reference the first epoch fills
it and the second is timed, as in every epoch but the first; TRL's precomputed reference is computed
before the first step. --micro-batch computes that many
samples at a time on both sides: TRL then accumulates gradients.

--fast gives TRL what is installed of flash attention and Liger's layers. --learning-rate 1e-12
leaves the weights as they are, so that the mean losses of all sides can be compared.

Rounds, memory and the floor: rounds.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rounds import (
    CUDA,
    Clock,
    Memory,
    floor_seconds,
    lightning_trainer,
    needed,
    parser,
    read_rows,
    run,
)
from rounds import spread as spread_over

CONTESTANTS = (
    ("trl-dpo", "trl-dpo-precomputed", "ours-pointwise", "ours-pointwise-cached"),
    ("trl-simpo", "ours-simpo"),
)
ON_REQUEST = (("trl-dpo", "ours-dpo"),)  # named in --contestants
UNTIMED = 2  # steps before those that are timed
# Forward, backward, reference; others two.
PASSES = {"trl-dpo": 3, "ours-dpo": 3, "ours-pointwise": 3}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("records", type=Path)
    options.add_argument(
        "--steps", type=int, default=8, help="timed, after two that are not"
    )
    options.add_argument("--micro-batch", type=int, help="samples computed at a time")
    options.add_argument("--learning-rate", type=float, default=5e-5)
    arguments = options.parse_args()
    asked = set(arguments.contestants or ())
    groups = ON_REQUEST if "ours-dpo" in asked else ()
    run(arguments, (*groups, *CONTESTANTS), measure, "step")


def measure(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Median seconds a step, the floor of the timed steps' mean, and memory."""
    from transformers import AutoTokenizer

    clock = Clock()
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    rows = [
        row
        for row in read_rows(arguments.records)
        if len(prompt_ids(row, tokenizer)) <= arguments.max_prompt
    ]
    rows = spread_over(rows, arguments.batch_size * (arguments.steps + UNTIMED))
    with tempfile.TemporaryDirectory() as folder:
        side = run_trl if name.startswith("trl") else run_ours
        memory, sizes, loss = side(name, arguments, rows, Path(folder), clock)
        found = {**clock.median_of_last(arguments.steps), **memory.peak()}
        passes = PASSES.get(name, 2)
        floor = floor_seconds(arguments.folder, sizes, passes)
        flops, _ = needed(arguments.folder, sizes)
    steps = len(rows) / arguments.batch_size
    tokens = sum(
        prompt + response for prompt, responses in sizes for response in responses
    )
    return {
        **found,
        "floor_seconds": round(floor / steps, 4),
        "samples": arguments.batch_size,
        "tokens": tokens / steps,  # of whole sequences, the prompt with each response
        "flops": passes * flops / steps,
        "loss": loss,
    }


def prompt_ids(row: dict[str, Any], tokenizer: Any) -> list[int]:
    """The prompt of a record, its tools in the form that the module gives to chat templates too."""
    tools = (json.loads(tool) for tool in row["tools"])
    ids: list[int] = tokenizer.apply_chat_template(
        row["messages"],
        tools=[
            {"type": "function", "function": tool.get("function", tool)}
            for tool in tools
        ]
        or None,
        add_generation_prompt=True,
        return_dict=True,
    )["input_ids"]
    return ids


def examples_for_trl(
    rows: list[dict[str, Any]], tokenizer: Any
) -> tuple[list[dict[str, str]], list[tuple[int, list[int]]]]:
    """Prompt, chosen and rejected as texts, and their lengths in tokens."""
    examples, sizes = [], []
    for row in rows:
        ids = prompt_ids(row, tokenizer)
        sides = {
            side: row[f"{side}_response"]["content"] for side in ("chosen", "rejected")
        }
        examples.append({"prompt": tokenizer.decode(ids), **sides})
        sizes.append(
            (
                len(ids),
                [len(tokenizer(text)["input_ids"]) + 1 for text in sides.values()],
            )
        )
    return examples, sizes


def trl_settings(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What both of TRL's trainers are given."""
    micro = arguments.micro_batch or arguments.batch_size
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": arguments.batch_size // micro,
        "max_steps": arguments.steps + UNTIMED,
        "bf16": True,
        "use_cpu": not CUDA,
        "gradient_checkpointing": False,
        "learning_rate": arguments.learning_rate,
        "logging_steps": 1,
        "use_liger_kernel": arguments.fast and find_spec("liger_kernel") is not None,
        "max_length": 2048,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": CUDA,
    }


def run_trl(
    name: str,
    arguments: argparse.Namespace,
    rows: list[dict[str, Any]],
    folder: Path,
    clock: Clock,
) -> tuple[Memory, list[tuple[int, list[int]]], float]:
    """TRL's trainer on prompt, chosen and rejected as texts, rendered as ours are."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    from pl_pointwise.tasks.language_model.likelihood.preference_losses import (
        PreferenceLosses,
    )

    memory = Memory()
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    examples, sizes = examples_for_trl(rows, tokenizer)

    class Marks(TrainerCallback):
        on_step_begin = on_train_end = clock.mark

    settings = trl_settings(arguments, folder)
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, task_type="CAUSAL_LM")
    flash = arguments.fast and find_spec("flash_attn") is not None
    model = AutoModelForCausalLM.from_pretrained(
        arguments.folder,
        dtype="auto",
        use_safetensors=True,
        attn_implementation="flash_attention_2" if flash else None,
    )
    if name.startswith("trl-dpo"):
        precomputed = name.endswith("precomputed")
        config = DPOConfig(**settings, precompute_ref_log_probs=precomputed)
        trainer_class = DPOTrainer
    else:
        losses = PreferenceLosses()
        beta, gamma = losses.simpo_beta, losses.simpo_gamma
        config = CPOConfig(
            **settings, loss_type="simpo", cpo_alpha=0.0, beta=beta, simpo_gamma=gamma
        )
        trainer_class = CPOTrainer
    trainer = trainer_class(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(examples),
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=[Marks()],
    )
    trainer.train()
    logged = [
        float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry
    ]
    return memory, sizes, statistics.fmean(logged)


def run_ours(
    name: str,
    arguments: argparse.Namespace,
    rows: list[dict[str, Any]],
    folder: Path,
    clock: Clock,
) -> tuple[Memory, list[tuple[int, list[int]]], float]:
    """When2CallModule under Lightning: pointwise constraints with KL, or SimPO."""
    from pl_pointwise import Pointwise
    from pl_pointwise.tasks import Policy, When2CallDataModule, When2CallModule
    from pl_pointwise.tasks.language_model.data import Preparation
    from pl_pointwise.tasks.when2call.module import PAPER_TRAINING

    memory = Memory()
    records = folder / "records.jsonl"
    records.write_text("\n".join(json.dumps(row) for row in rows))
    cached, plain = name.endswith("cached"), name.partition("-")[2] in ("simpo", "dpo")
    optimization = replace(
        PAPER_TRAINING.optimization, learning_rate=arguments.learning_rate
    )
    module = When2CallModule(
        Policy(arguments.folder, reference_cache="memory" if cached else None),
        formulation=None if plain else Pointwise(alpha=10.0, dual_lr=0.1),
        objective=name.partition("-")[2] if plain else "kl",
        rejected_tolerance=-6.0,
        training=replace(
            PAPER_TRAINING,
            optimization=optimization,
            micro_batch_size=arguments.micro_batch,
        ),
    )
    losses: list[float] = []
    step = module.training_step

    def training_step(*given: Any) -> Any:
        found = step(*given)
        losses.append(float(module.measured.objective.mean()))
        return found

    module.training_step = training_step
    data = When2CallDataModule(
        source="files",
        train_file=str(records),
        preparation=Preparation(
            max_prompt_length=arguments.max_prompt, val_fraction=0.0
        ),
        batch_size=arguments.batch_size,
    )
    lightning_trainer(folder, clock, max_epochs=2 if cached else 1).fit(module, data)
    dataset = data.datasets["train"]
    encoded = [dataset[place] for place in range(len(dataset))]
    sizes = [
        (len(row["prompt"]), [len(r) for r in row["responses"]]) for row in encoded
    ]
    return memory, sizes, statistics.fmean(losses)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
