"""The study of two-sided requirements: its upper layers are the model's, its runs go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import two_sided
from tests.tasks.conftest import build_model, build_tokenizer, write_rows


@pytest.fixture
def model() -> Any:
    return build_model("llama", vocab_size=len(build_tokenizer())).eval()


@pytest.fixture
def tokenizer() -> Any:
    return build_tokenizer()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, first in (("forget", 0), ("keep", 7)):
        rows = [
            {"prompt": f"{name} {i * i}?", "answer": f"{first + i} is{'!' * (i % 3)}"}
            for i in range(8)
        ]
        write_rows(tmp_path / f"{name}.jsonl", rows)
    return tmp_path


@pytest.mark.parametrize("layers", [1, 2])
def test_the_upper_layers_say_what_the_whole_model_says(
    model: Any, tokenizer: Any, data: Path, layers: int
) -> None:
    scale = two_sided.Scale(forget=3, keep=3, layers=layers)
    records = two_sided.draw(data, model, tokenizer, 0, scale)
    batch = two_sided.joined(records)
    found = two_sided.Upper(model, layers)(batch).split(batch["lengths"].tolist())
    prompts = {}
    for name in ("forget", "keep"):
        for line in map(json.loads, (data / f"{name}.jsonl").read_text().splitlines()):
            prompts[tuple(tokenizer(line["answer"])["input_ids"])] = line["prompt"]
    for row, policy in zip(records, found, strict=True):
        prompt = two_sided.TEMPLATE.format(prompt=prompts[tuple(row["ids"].tolist())])
        tokens = tokenizer(prompt)["input_ids"] + row["ids"].tolist()
        with torch.no_grad():
            whole = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        torch.testing.assert_close(policy, whole[-len(row["ids"]) - 1 : -1])


def test_a_study_tunes_chooses_and_goes_on_where_it_stopped(
    model: Any, tokenizer: Any, data: Path, tmp_path: Path
) -> None:
    scale = two_sided.Scale(
        forget=3,
        keep=5,
        batch=4,
        teaching_epochs=10,
        epochs=1,
        teaching_rate=0.03,
        rate=0.01,
    )
    output = tmp_path / "runs.csv"
    methods = ["Pointwise()", "hinge 0.3", "hinge 30", "NPO 0.1"]
    rest = model, tokenizer, data, output
    two_sided.study(*rest, [two_sided.TUNING_SEED], methods, scale)
    before = output.read_text()
    two_sided.study(*rest, [two_sided.TUNING_SEED], methods, scale)
    assert output.read_text() == before
    two_sided.study(*rest, [0], None, scale)
    assert output.read_text().startswith(before)
    table = two_sided.read(output).set_index(["seed", "method"])
    assert table.index.is_unique
    judged = list(table.loc[0].index)
    assert judged[:4] == ["taught", "target", "Pointwise()", "Relaxed(price=10)"]
    assert [name[:5] for name in judged[4:]] == ["hinge", "NPO 0"]
    taught = table.loc[(two_sided.TUNING_SEED, "taught")]
    assert taught["kl"] == 0
    assert taught["keep: lost"] == 0
    assert taught["forget: too little"] > 0
    assert table.loc[(0, "target"), "forget: outside"] == 0
    assert "| Pointwise() |" in two_sided.summarise(two_sided.read(output))
