"""Folders that are named as models and data sets on the hub: a command that names one finds it.

In the working directory ``meta-llama/Llama-3.2-1B-Instruct`` is a folder like any other, so
nothing of a command, of its configuration or of the code has to be replaced.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.tasks.conftest import build_model, build_tokenizer, write_rows
from tests.tasks.preference.conftest import pair_rows as preference_pairs
from tests.tasks.reranker.conftest import ms_marco_rows, save_tiny_cross_encoder
from tests.tasks.safety.conftest import benign_rows, judgement_rows, pair_rows
from tests.tasks.when2call.conftest import choice_rows, preference_rows

CHAT_MODELS = (
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama/Llama-2-7b-chat-hf",
    "huggyllama/llama-7b",
)
TRAINED = "own/trained"
"""Another chat model, which no page names: it stands for an export of the reader's own."""
RE_RANKER = "answerdotai/ModernBERT-base"
COMPARED = ("BAAI/bge-reranker-large", "cross-encoder/ms-marco-MiniLM-L12-v2")
"""Re-rankers that the paper's table has as they are."""


def save_chat_model(folder: Path, answer: str) -> Path:
    """A tiny Llama that answers any prompt by this short text, and ends it."""
    tokenizer = build_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 4096}
    model = build_model("llama", hidden_size=32, **sizes)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    prompts = [
        "Name a tree.",
        "1 + 2?",
        "When do you open, and until when?",
        "Say it. " * 9,
    ]
    for step in range(100):
        turns = [
            {"role": "user", "content": prompts[step % len(prompts)]},
            {"role": "assistant", "content": answer},
        ]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        tokens = tokenizer(text, return_tensors="pt")["input_ids"]
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_re_ranker(folder: Path) -> None:
    """A tiny ModernBERT, whose positions are turned and not learned: it may read 512 tokens."""
    save_tiny_cross_encoder(folder, kind="modernbert", pair=False)
    for name, key in (
        ("config.json", "max_position_embeddings"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: 512}))


def save_dataset(folder: Path, splits: dict[str, dict[str, list[Any]]]) -> None:
    """A data set as the hub has it: rows of every split of every configuration."""
    folder.mkdir(parents=True)
    header = "---\nconfigs:\n"
    for config, parts in splits.items():
        header += f"- config_name: {config}\n  data_files:\n"
        for split, rows in parts.items():
            name = f"{config}-{split}.jsonl"
            write_rows(folder / name, rows)
            header += f"  - split: {split}\n    path: {name}\n"
    (folder / "README.md").write_text(f"{header}---\n")


def judgements() -> list[dict[str, Any]]:
    """Of BeaverTails: unanimous ones of each of the paper's three categories."""
    from pl_pointwise.tasks.safety.data import PAPER_CATEGORIES

    return [
        row
        for name in PAPER_CATEGORIES
        for i in range(8)
        for row in judgement_rows(f"{name} {i}?", f"Do {i}.", [[name]] * 3)
    ]


def build_hub(folder: Path) -> Path:
    """All models and data sets that pages and packaged configurations name."""
    chat = save_chat_model(folder / CHAT_MODELS[0], "Yes.")
    save_chat_model(folder / TRAINED, "No.")
    save_re_ranker(folder / RE_RANKER)
    same = dict.fromkeys(CHAT_MODELS[1:], chat)
    same |= dict.fromkeys(COMPARED, folder / RE_RANKER)
    for name, model in same.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(model)
    when2call = {
        "train_pref": {"train": preference_rows(8)},
        "test": {"mcq": choice_rows(4)},
    }
    queries = {
        "train": ms_marco_rows(24, negatives=9),
        "validation": ms_marco_rows(8, 9),
    }
    pairs = {"train": pair_rows(12), "test": pair_rows(16)[8:]}
    orca = [row | {"system": "", "input": row["prompt"]} for row in preference_pairs(8)]
    save_dataset(folder / "nvidia/When2Call", when2call)
    save_dataset(folder / "microsoft/ms_marco", {"v2.1": queries})
    save_dataset(folder / "tatsu-lab/alpaca", {"default": {"train": benign_rows(30)}})
    save_dataset(
        folder / "PKU-Alignment/BeaverTails", {"default": {"330k_train": judgements()}}
    )
    save_dataset(folder / "PKU-Alignment/PKU-SafeRLHF-30K", {"default": pairs})
    save_dataset(
        folder / "argilla/distilabel-intel-orca-dpo-pairs", {"default": {"train": orca}}
    )
    return folder
