"""A sample that is longer than the positions a model has learnt is refused before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
)

from pl_pointwise.errors import DataError
from pl_pointwise.tasks import When2CallDataModule
from pl_pointwise.tasks.language_model.generation import (
    Generation,
    generate_ids,
    learnt_positions,
)
from tests.tasks.conftest import build_tokenizer, make_data
from tests.tasks.when2call.conftest import preference_row, write_rows

SIZES: dict[str, Any] = {"vocab_size": 300, "n_positions": 220, "n_embd": 16, "n_layer": 1}
GPT2 = GPT2Config(**SIZES, n_head=2)


@pytest.mark.parametrize(
    ("config", "positions"),
    [(GPT2, 220), (LlamaConfig(max_position_embeddings=512), None), (BloomConfig(), None)],
)
def test_learnt_positions_are_read_from_the_configuration(config, positions) -> None:
    assert learnt_positions(config) == positions


def data_of(config: PreTrainedConfig, folder: Path) -> When2CallDataModule:
    config.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    rows = [preference_row(f"{i} + 1?") for i in range(2)]
    row = preference_row()
    row["rejected_response"]["content"] = "No. " * 30
    path = write_rows(folder / "t.jsonl", [*rows, row])
    return make_data(When2CallDataModule, folder, {"train_file": str(path)}, val_fraction=0)


def test_more_than_learnt_positions_is_refused_before_training(tmp_path) -> None:
    """GPT-2 would stop with an IndexError in the step that meets the sample."""
    message = r"t.jsonl, line 3: a response of .* max_length=220.* learnt 220 positions"
    with pytest.raises(DataError, match=message):
        data_of(GPT2, tmp_path).setup("fit")


def test_an_answer_beyond_learnt_positions_is_refused() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GPT2).eval()
    prompts = [[5] * 210, [6] * 3]
    found = generate_ids(model, prompts, Generation(max_new_tokens=10), ends=[2])
    assert len(found) == 2
    with pytest.raises(ValueError, match=r"220 positions of the model. Lower policy.generation"):
        generate_ids(model, prompts, Generation(max_new_tokens=11), ends=[2])
