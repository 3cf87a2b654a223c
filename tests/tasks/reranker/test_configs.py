"""Every packaged re-ranking configuration runs, in process, on a tiny model and local records.

Only the model, the data and the length of the run are replaced; every other key is the shipped one.
"""

from __future__ import annotations

import csv
import json
from inspect import signature
from pathlib import Path

import pytest
import torch
import yaml

import pl_pointwise
from pl_pointwise.cli import PointwiseCLI, main
from pl_pointwise.compare.runs import Comparison, ParsedCLI
from pl_pointwise.compare.tables import family
from pl_pointwise.configs import packaged_configs

CONFIGS = {n: p for n, p in packaged_configs().items() if n.partition("/")[0] == "reranker"}
ROWS = [name for name in CONFIGS if name.endswith(("table", "rows"))]
ABLATIONS = [name for name in ROWS if name not in ("reranker/table", "reranker/demo_rows")]
OVERLAYS = [name for name in CONFIGS if name not in ROWS and "/" in name]


@pytest.fixture
def tiny(tiny_cross_encoder_dir, make_rows, write_jsonl, tmp_path) -> list[str]:
    """Arguments that put a tiny model, local records and a two-step run in place."""
    train = write_jsonl(tmp_path / "train.jsonl", make_rows(6))
    held_out = write_jsonl(tmp_path / "val.jsonl", make_rows(3))
    model = str(tiny_cross_encoder_dir)
    init = {"model.init_args.model_name": model, "data.init_args.model_name": model}
    init |= {"data.init_args.source": "files", "data.init_args.train_file": str(train)}
    init |= {"data.init_args.val_file": str(held_out), "data.init_args.batch_size": "3"}
    init |= {"data.init_args.negatives": "3", "data.init_args.max_length": "64"}
    init |= {"trainer.accelerator": "cpu", "trainer.precision": "32-true"}
    init |= {"trainer.max_epochs": "1", "trainer.logger": "false"}
    init |= {"trainer.enable_progress_bar": "false", "trainer.enable_checkpointing": "false"}
    return [word for key, value in init.items() for word in (f"--{key}", value)]


@pytest.mark.parametrize("name", ["reranker", *OVERLAYS])
def test_packaged_config_trains(name, tiny, tmp_path, capsys) -> None:
    overlay = [] if name == "reranker" else ["--config", name]
    root = ["--trainer.default_root_dir", str(tmp_path / "run")]
    main(["fit", "--config", "reranker", *overlay, *tiny, *root])


def test_multipliers_in_files_are_those_in_memory(tiny, tmp_path) -> None:
    words = ["--config", "reranker", "--config", "reranker/pointwise", *tiny]
    found = []
    for folder in (None, tmp_path / "multipliers"):
        option = [] if folder is None else ["--model.init_args.multiplier_folder", str(folder)]
        cli = PointwiseCLI([*words, *option, "--seed_everything", "1"], run=False)
        cli.trainer.fit(cli.model, cli.datamodule)
        found.append(cli.model.multipliers["relevance"].clone())
        assert folder is None or any(folder.rglob("*"))
    assert found[0].max() > 0
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("name", sorted(set(ROWS) - set(ABLATIONS)))
def test_packaged_rows_make_a_table(name, tiny, tmp_path) -> None:
    output = tmp_path / "out"
    main(["compare", "--config", "reranker", "--rows", name, "--output", str(output), *tiny])
    rows = list(csv.DictReader((output / "comparison.csv").open()))
    assert [row["row"] for row in rows] == list(yaml.safe_load(CONFIGS[name].read_text()))
    for row in rows:
        assert row["error"] == ""
        assert float(row["test/relevance/max"]) >= float(row["test/relevance/cvar95"])
    assert (output / "cdf.png").stat().st_size > 10_000
    assert "| pointwise" in (output / "comparison.md").read_text()


def test_every_row_of_an_ablation_sets_what_its_name_says(tmp_path) -> None:
    """The row is what its tables and pictures are read by."""
    argument = {"eta": "dual_lr", "alpha": "alpha", "beta": "beta", "penalty": "weight"}
    for name in ABLATIONS:
        base = ["reranker", "reranker/demo"]
        for run in Comparison(base, tmp_path / Path(name).name, name).runs:
            run.folder.mkdir(parents=True)
            for path, text in run.overlays.items():
                path.write_text(text)
            model = ParsedCLI(run.arguments, run=False).config.model.init_args
            method, setting = family(run.row)
            formulation = model.formulation.init_args
            if setting and method == "average":
                assert model.tolerance == float(setting)
            elif setting:
                key, _, value = setting.rpartition("=")
                assert formulation[argument[key or method]] == float(value)
            if "standard" in method:
                assert formulation.alpha is None
            assert model.evaluation_tolerance == 3.0


def test_the_ends_of_every_ablation_run(tiny, tmp_path) -> None:
    rows = {}
    for name in ABLATIONS:
        found = list(yaml.safe_load(CONFIGS[name].read_text()).items())
        rows |= dict((found[0], found[1], found[-1]))
    (tmp_path / "rows.yaml").write_text(yaml.safe_dump(rows, sort_keys=False))
    output = tmp_path / "out"
    arguments = ["--rows", str(tmp_path / "rows.yaml"), "--output", str(output), *tiny]
    main(["compare", "--config", "reranker", *arguments])
    lines = list(csv.DictReader((output / "comparison.csv").open()))
    assert [line["row"] for line in lines] == list(rows)
    assert not any(line["error"] for line in lines)


@pytest.mark.parametrize("name", ["reranker/average", "reranker/pointwise", "reranker/relaxed"])
def test_overlay_states_every_argument_of_its_formulation(name) -> None:
    """LightningCLI merges init_args, so an argument left out would keep another method's value."""
    config = yaml.safe_load(CONFIGS[name].read_text())["model"]["init_args"]["formulation"]
    kind = getattr(pl_pointwise, config["class_path"].rpartition(".")[2])
    assert set(config["init_args"]) == set(signature(kind).parameters)


def test_every_method_is_judged_at_the_same_tolerance(tiny) -> None:
    bounds = set()
    for name in OVERLAYS:
        args = ["--config", "reranker", "--config", name, *tiny]
        bounds.add(PointwiseCLI(args, run=False).model.evaluation_constraints["relevance"].at_least)
    assert bounds == {3.0}


def test_fit_then_test_then_predict_from_the_checkpoint(
    tiny, tmp_path, write_jsonl, capsys
) -> None:
    """The commands of the README, one after the other, with the checkpoint between them."""
    run = tmp_path / "run"
    tiny[tiny.index("--trainer.enable_checkpointing") + 1] = "true"
    base = ["--config", "reranker", "--config", "reranker/pointwise", *tiny]
    base += ["--trainer.default_root_dir", str(run)]
    main(["fit", *base, "--trainer.callbacks+", "ModelExport"])
    assert (run / "export/model.safetensors").is_file()
    (checkpoint,) = run.rglob("*.ckpt")
    state = torch.load(checkpoint, weights_only=True)
    assert state["pl_pointwise"]["multipliers"]["relevance"].shape == (6, 3)
    assert state["pl_pointwise"]["multipliers"]["relevance"].max() > 0

    main(["test", *base, "--ckpt_path", str(checkpoint)])
    assert "relevance/cvar95" in capsys.readouterr().out

    queries = [{"query": "what is ice", "passages": ["ice is cold", "fish eat", "wind"]}]
    asked = write_jsonl(tmp_path / "queries.jsonl", queries)
    found = tmp_path / "found.jsonl"
    writer = ["--trainer.callbacks+", "PredictionWriter"]
    writer += ["--trainer.callbacks.path", str(found)]
    asked_for = ["--data.init_args.predict_file", str(asked), "--ckpt_path", str(checkpoint)]
    main(["predict", *base, *asked_for, *writer])
    (answer,) = [json.loads(line) for line in found.read_text().splitlines()]
    assert sorted(answer["order"]) == [0, 1, 2]
    assert answer["scores"][answer["order"][0]] == max(answer["scores"])
