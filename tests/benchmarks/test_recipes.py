"""The recipes: every one can run, and the frozen encoder is the model's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

from benchmarks.evidence import recipes
from pl_pointwise.tasks import RerankerModule
from pl_pointwise.tasks.reranker.data import RerankerDataModule

WORDS = ["red", "green", "blue", "one", "two", "three", "query", "sentence", ":", "a", "b"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=64, num_labels=1, initializer_range=0.5,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Records of three parts, with four negatives each, some of them short."""
    made = {}
    for number, part in enumerate(recipes.PARTS):
        rows = []
        for i in range(6):
            texts = [" ".join(WORDS[(i + j + number) % 6 :][: 1 + (i + j) % 4]) for j in range(5)]
            passages = {"is_selected": [1, 0, 0, 0, 0], "passage_text": texts}
            rows.append({"query": f"{WORDS[i]} {part}", "passages": passages})
        made[part] = tmp_path / f"{part}.jsonl"
        made[part].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def test_the_frozen_encoder_scores_as_the_model_does(model: str, files: dict[str, Path]) -> None:
    samples = recipes.features(model, files["test"])
    settings = {"max_length": 48, "template": "Query: {query}\nSentence: {passage}"}
    data = RerankerDataModule(
        source="files", test_file=str(files["test"]), negatives=4, model_name=model, **settings
    )
    data.setup("test")
    whole, frozen = RerankerModule(model, **settings).eval(), recipes.FrozenReranker(model)
    (batch,) = data.test_dataloader()["test"]
    stacked = torch.stack([sample["features"] for sample in samples])
    with torch.no_grad():
        torch.testing.assert_close(frozen.eval()({"features": stacked}), whole(batch))
    assert whole(batch).std() > 0.01
    again = recipes.features(model, files["test"])  # from the file that was kept
    assert torch.equal(torch.stack([sample["features"] for sample in again]), stacked)


def test_a_run_measures_its_last_and_its_best_weights_on_every_part(
    model: str, files: dict[str, Path]
) -> None:
    samples = {p: recipes.features(model, files[p]) for p in recipes.PARTS}
    recipe = {**recipes.recipes()["pointwise"], "epochs": 2, "learning_rate": 0.05}
    rows = recipes.execute(recipe, 0, model, samples)
    assert [(row["weights"], row["part"]) for row in rows] == [
        (weights, part) for weights in ("last", "best checkpoint") for part in recipes.PARTS
    ]
    by = {(row["weights"], row["part"]): row for row in rows}
    assert by["best checkpoint", "validation"]["cvar95"] <= by["last", "validation"]["cvar95"]
    averaged = recipes.execute({**recipe, "average": 0.5}, 0, model, samples)
    assert [row["weights"] for row in averaged] == ["average"] * 3
    assert averaged[0]["score std"] != by["last", "train"]["score std"]


def test_every_recipe_can_be_built(model: str) -> None:
    for recipe in recipes.recipes().values():
        options = ("formulation", "tolerance", "constrain", "dropout")
        module = recipes.FrozenReranker(model, **{key: recipe[key] for key in options})
        assert module.constraints["relevance"].at_least == recipe["tolerance"]
