"""The recipes: every one can run, and the frozen encoder is the model's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.evidence import recipes
from pl_pointwise.tasks import RerankerModule
from pl_pointwise.tasks.reranker.data import RerankerDataModule
from tests.tasks.conftest import write_rows
from tests.tasks.reranker.conftest import ms_marco_rows, save_tiny_cross_encoder


@pytest.fixture
def model(tmp_path: Path) -> str:
    # As the one of the studies.
    return str(save_tiny_cross_encoder(tmp_path / "model", 2))


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Records of three parts, with four negatives each."""
    rows = ms_marco_rows(18, negatives=4)
    return {
        part: write_rows(tmp_path / f"{part}.jsonl", rows[6 * number : 6 * number + 6])
        for number, part in enumerate(recipes.PARTS)
    }


def test_the_frozen_encoder_scores_as_the_model_does(
    model: str, files: dict[str, Path]
) -> None:
    samples = recipes.features(model, files["test"])
    settings = {"max_length": 48, "template": "Query: {query}\nSentence: {passage}"}
    data = RerankerDataModule(
        source="files",
        test_file=str(files["test"]),
        negatives=4,
        model_name=model,
        **settings,
    )
    data.setup("test")
    whole, frozen = (
        RerankerModule(model, **settings).eval(),
        recipes.FrozenReranker(model),
    )
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
        (weights, part)
        for weights in ("last", "best checkpoint")
        for part in recipes.PARTS
    ]
    by = {(row["weights"], row["part"]): row for row in rows}
    assert (
        by["best checkpoint", "validation"]["cvar95"]
        <= by["last", "validation"]["cvar95"]
    )
    averaged = recipes.execute({**recipe, "average": 0.5}, 0, model, samples)
    assert [row["weights"] for row in averaged] == ["average"] * 3
    assert averaged[0]["score std"] != by["last", "train"]["score std"]


def test_every_recipe_can_be_built(model: str) -> None:
    for recipe in recipes.recipes().values():
        options = ("formulation", "tolerance", "dropout")
        module = recipes.FrozenReranker(model, **{key: recipe[key] for key in options})
        assert module.constraints["relevance"].at_least == recipe["tolerance"]
