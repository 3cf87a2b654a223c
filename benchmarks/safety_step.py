"""A safety training step beside the plain implementation, on the same records.

    python benchmarks/safety_step.py MODEL BENIGN UNSAFE

MODEL is the folder of a causal language model (MiniMind2-Small), BENIGN a JSONL of the schema of
tatsu-lab/alpaca, UNSAFE one of {"prompt"}. A step minimises the KL of answers to benign prompts to
the reference, with one constraint for each prompt on the likelihood of its refusal. The plain
implementation, written here, makes one padded batch of prompts with answers and prompts with
refusals, as preference trainers do, computes all logits, of the answers under the reference too,
and masks what is no response; "plain-apart" pads answers and refusals apart. Everything else is the
same code: loaders, formulation, optimizer, Lightning's trainer; whole steps are timed. With the
cached reference, those of the second epoch are.

Rounds, memory and the floor: rounds.py.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rounds import (
    Clock,
    Memory,
    floor_seconds,
    lightning_trainer,
    parser,
    read_rows,
    run,
    spread,
)
from torch import Tensor

CONTESTANTS = (("plain", "plain-apart", "ours", "ours-cached"),)
UNTIMED = 2  # steps before those that are timed


def main() -> None:
    options = parser(__doc__)
    options.add_argument("benign", type=Path)
    options.add_argument("unsafe", type=Path)
    options.add_argument(
        "--steps", type=int, default=8, help="timed, after two that are not"
    )
    options.add_argument("--micro-batch", type=int, help="samples computed at a time")
    run(options.parse_args(), CONTESTANTS, measure, "step")


def measure(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Median seconds a step, the floor of all steps' mean, and memory."""
    from pl_pointwise import Pointwise
    from pl_pointwise.tasks import Policy, SafetyDataModule, SafetyModule
    from pl_pointwise.tasks.language_model.data import Preparation
    from pl_pointwise.tasks.safety.data import Selection
    from pl_pointwise.tasks.safety.module import PAPER_TRAINING
    from pl_pointwise.tasks.safety.records import HELPFUL

    memory, clock = Memory(), Clock()
    half = arguments.batch_size * (arguments.steps + UNTIMED) // 2
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for kind in ("benign", "unsafe"):
            files[kind] = Path(folder) / f"{kind}.jsonl"
            rows = spread(read_rows(getattr(arguments, kind)), half)
            files[kind].write_text("\n".join(json.dumps(row) for row in rows))
        module_class = SafetyModule
        if name.startswith("plain"):
            module_class = plain_module(SafetyModule, apart=name == "plain-apart")
        cached = name == "ours-cached"
        module = module_class(
            Policy(arguments.folder, reference_cache="memory" if cached else None),
            formulation=Pointwise(alpha=10.0, dual_lr=0.1),
            training=replace(PAPER_TRAINING, micro_batch_size=arguments.micro_batch),
        )
        data = SafetyDataModule(
            source="files",
            unsafe_schema="labelled",
            benign_file=str(files["benign"]),
            unsafe_file=str(files["unsafe"]),
            selection=Selection(benign_count=None),
            preparation=Preparation(
                max_prompt_length=arguments.max_prompt, invalid="skip", val_fraction=0.0
            ),
            batch_size=arguments.batch_size,
        )
        trainer = lightning_trainer(Path(folder), clock, max_epochs=2 if cached else 1)
        trainer.fit(module, data)
        found = {**clock.median_of_last(arguments.steps), **memory.peak()}
        dataset = data.datasets["train"]
        encoded = [dataset[place] for place in range(len(dataset))]
        everything = [
            (len(row["prompt"]), [len(r) for r in row["responses"]]) for row in encoded
        ]
        floor = floor_seconds(arguments.folder, everything, 2)
        if not cached:
            answers = [
                (len(row["prompt"]), [len(row["responses"][0])])
                for row in encoded
                if HELPFUL in row["record"].roles
            ]
            floor += floor_seconds(arguments.folder, answers, 1)
    steps = len(encoded) / arguments.batch_size
    return {
        **found,
        "floor_seconds": round(floor / steps, 4),
        "samples": arguments.batch_size,
    }


def plain_module(base: type, apart: bool) -> type:
    """The safety module, its responses scored the plain way, in one batch or one of each kind."""
    from pl_pointwise.tasks.language_model.likelihood.scoring import ResponseStatistics

    class Plain(base):  # type: ignore[misc, valid-type]
        def forward(self, batch: dict[str, Any]) -> ResponseStatistics:
            reference = self.referred(batch)
            lengths, device = batch["response_lengths"], self.device
            wanted = (lengths > 0) & reference
            sums = torch.zeros(lengths.shape, device=device)
            divergences = torch.zeros(lengths.shape, device=device)
            every = (lengths > 0).nonzero()  # (M, 2) sample and column
            columns = [
                every[every[:, 1] == column] for column in range(lengths.shape[1])
            ]
            for pairs in columns if apart else [every]:
                if len(pairs) == 0:
                    continue
                place = tuple(pairs.to(device).T)
                sequences = whole_sequences(batch, pairs)
                ids, mask, answer = (tensor.to(device) for tensor in sequences)
                policy = all_log_probabilities(self.model, ids, mask)
                chosen = policy.gather(2, ids[:, 1:, None]).squeeze(2)
                sums = sums.index_put(place, (chosen * answer).sum(1))
                asked = wanted[pairs[:, 0], pairs[:, 1]].to(device)
                if asked.any():
                    with torch.no_grad(), self.model.disable_adapter():
                        fixed = all_log_probabilities(
                            self.model, ids[asked], mask[asked]
                        )
                    policy, answer = policy[asked], answer[asked]
                    kl = (policy.exp() * (policy - fixed)).sum(2)
                    place = tuple(index[asked] for index in place)
                    divergences = divergences.index_put(
                        place, (kl * answer).sum(1) / answer.sum(1)
                    )
            sizes = lengths.to(device)
            return ResponseStatistics(
                sums, sums / sizes.clamp(min=1), sizes, divergences
            )

    return Plain


def all_log_probabilities(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Of every word at every place but the last, (M, L − 1, V), float32."""
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return logits[:, :-1].float().log_softmax(-1)


def whole_sequences(
    batch: Mapping[str, Any], pairs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Prompts with one response each, as padded sequences.

    pairs: (M, 2) sample and column  →  ids (M, L), what is no padding (M, L), and where the next
    token is the response's (M, L − 1)
    """
    sizes = [
        (int(batch["prompt_lengths"][row]), int(batch["response_lengths"][row, column]))
        for row, column in pairs.tolist()
    ]
    width = max(map(sum, sizes))
    ids = torch.zeros((len(sizes), width), dtype=torch.long)
    mask, answer = torch.zeros_like(ids), torch.zeros((len(sizes), width - 1))
    rows = zip(pairs.tolist(), sizes, strict=True)
    for place, ((row, column), (prompt, response)) in enumerate(rows):
        ids[place, :prompt] = batch["prompt_ids"][row, :prompt]
        ids[place, prompt : prompt + response] = batch["response_ids"][
            row, column, :response
        ]
        mask[place, : prompt + response] = 1
        answer[place, prompt - 1 : prompt + response - 1] = 1
    return ids, mask, answer


if __name__ == "__main__":
    main()
