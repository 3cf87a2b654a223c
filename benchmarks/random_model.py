"""A small language model of random weights, its tokenizer, and records, made on the spot.

For benchmarks that must run anywhere without a download. Words are "w0", "w1", …; prompts share
nothing, so that nothing is cached that would not be in earnest.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WORDS = 8000
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} {% endif %}"
    "{% for message in messages %}{{ message.role }} {{ message.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def write_model(folder: Path) -> Path:
    """A Llama of 4 layers of 256 under a vocabulary of 8,000 words."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", "user", "assistant", "system"]
    vocabulary = special + [f"w{number}" for number in range(WORDS)]
    words = Tokenizer(
        WordLevel(
            {word: place for place, word in enumerate(vocabulary)}, unk_token="<unk>"
        )
    )
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATE,
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(vocabulary),
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_records(folder: Path, count: int = 64) -> dict[str, Path]:
    """Files by kind: preferences as When2Call's, benign records as Alpaca's, unsafe prompts."""
    draws = random.Random(0)

    def text(least: int, most: int) -> str:
        return " ".join(
            f"w{draws.randrange(WORDS)}" for _ in range(draws.randint(least, most))
        )

    rows: dict[str, Iterable[dict[str, Any]]] = {
        "preferences": [
            {
                "tools": [json.dumps({"name": "w1", "parameters": {"properties": {}}})],
                "messages": [{"role": "user", "content": text(200, 400)}],
                "chosen_response": {"role": "assistant", "content": text(20, 60)},
                "rejected_response": {"role": "assistant", "content": text(20, 60)},
            }
            for _ in range(count)
        ],
        "benign": [
            {"instruction": text(10, 40), "input": "", "output": text(100, 200)}
            for _ in range(count)
        ],
        "unsafe": [{"prompt": text(10, 40)} for _ in range(count)],
    }
    files = {}
    for kind, records in rows.items():
        files[kind] = folder / f"{kind}.jsonl"
        files[kind].write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return files
