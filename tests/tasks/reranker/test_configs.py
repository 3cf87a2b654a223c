"""Every packaged re-ranking configuration runs, in process, on a tiny model and local records.

Only the model, the data and the length of the run are replaced; every other key is the shipped one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pl_pointwise import Pointwise, Relaxed
from pl_pointwise.cli import PointwiseCLI, main
from pl_pointwise.tasks import reranker
from tests.tasks.conftest import (
    QUIET_RUN,
    comparison,
    comparisons,
    fitted_checkpoint,
    overlays,
    predictions,
    slow_tables,
    train,
    words,
    write_rows,
    written_files,
)
from tests.tasks.reranker.conftest import ms_marco_rows

FOLDER = Path(reranker.__file__).parent / "configs"


@pytest.fixture
def tiny(tiny_cross_encoder_dir, tmp_path) -> list[str]:
    """Arguments that put a tiny model, local records and a two-step run in place."""
    rows = {"train_file": ms_marco_rows(6), "val_file": ms_marco_rows(3)}
    model = str(tiny_cross_encoder_dir)
    init = {"model.init_args.model_name": model, "model.init_args.max_length": "64"}
    data = {"source": "files", "batch_size": "3", "negatives": "3", **written_files(tmp_path, rows)}
    init |= {f"data.init_args.{name}": value for name, value in data.items()}
    return words(init | {"trainer.max_epochs": "1"} | QUIET_RUN)


@pytest.mark.parametrize("name", ["reranker", *overlays("reranker")])
def test_packaged_config_trains(name, tiny, tmp_path) -> None:
    train("reranker", name, tiny, tmp_path / "run")


@pytest.mark.parametrize("name", slow_tables(comparisons("reranker")))
def test_packaged_comparison_makes_a_table(name, tiny, tmp_path, request) -> None:
    output = tmp_path / "out"
    if name != "demo":
        request.getfixturevalue("runs_alone")
    for row in comparison("reranker", name, tiny, output):
        assert float(row["test/relevance/max"]) >= float(row["test/relevance/cvar95"])
    if name == "demo":
        assert (output / "cdf.png").stat().st_size > 10_000
    assert "| pointwise" in (output / "comparison.md").read_text()


def test_the_models_name_is_given_once(tiny_cross_encoder_dir) -> None:
    """The data take the tokenizer of the module, whatever file or option names the model."""
    for path in FOLDER.rglob("*.yaml"):
        assert "model_name" not in str((yaml.safe_load(path.read_text()) or {}).get("data"))


def test_every_method_is_measured_against_the_same_tolerance(tiny) -> None:
    bounds = set()
    for name in overlays("reranker"):
        args = ["--config", "reranker", "--config", name, *tiny]
        bounds.add(PointwiseCLI(args, run=False).model.evaluation_constraints["relevance"].at_least)
    assert bounds == {3.0}


def test_the_papers_table_has_the_papers_settings(tiny) -> None:
    table = yaml.safe_load((FOLDER / "compare/table.yaml").read_text())
    found = {}
    for method in ("pointwise 1", "pointwise 3", "relaxed 0.1"):
        name, changed = table[method]
        args = ["--config", "reranker", "--config", name, "--config", yaml.safe_dump(changed)]
        module = PointwiseCLI([*args, *tiny], run=False).model
        found[method] = module.constraints["relevance"].at_least, module.formulations["relevance"]
    assert found == {
        "pointwise 1": (1, Pointwise(alpha=1.0, dual_lr=0.1)),
        "pointwise 3": (3, Pointwise(alpha=1.0, dual_lr=0.1)),
        "relaxed 0.1": (3, Relaxed(alpha=1.0, beta=0.1, dual_lr=0.1)),
    }


def test_fit_then_test_then_predict_from_the_checkpoint(tiny, tmp_path, capsys) -> None:
    """The commands of the README, one after the other, with the checkpoint between them."""
    exporting = [*tiny, "--trainer.callbacks+", "ModelExport"]
    base, checkpoint = fitted_checkpoint("reranker", exporting, tmp_path, ("relevance", (6, 3)))
    assert (tmp_path / "export/model.safetensors").is_file()

    main(["test", *base, "--ckpt_path", str(checkpoint)])
    assert "relevance/cvar95" in capsys.readouterr().out

    queries = [{"query": "what is ice", "passages": ["ice is cold", "fish eat", "wind"]}]
    asked = write_rows(tmp_path / "queries.jsonl", queries)
    (answer,) = predictions(base, asked, checkpoint)
    assert sorted(answer["order"]) == [0, 1, 2]
    assert answer["scores"][answer["order"][0]] == max(answer["scores"])
