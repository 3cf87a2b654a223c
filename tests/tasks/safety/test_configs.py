"""Every packaged safety configuration runs, in process, on a tiny model and local records.

Only the model, the data and the length of the run are replaced; every other key is the shipped one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pl_pointwise import Average, Optimization, Penalty, Pointwise, Relaxed, Training
from pl_pointwise.cli import PointwiseCLI, main
from pl_pointwise.tasks import Generation, Lora, safety
from tests.tasks.conftest import (
    QUIET_RUN,
    comparison,
    comparisons,
    fitted_checkpoint,
    predictions,
    slow_tables,
    train,
    trained,
    words,
)
from tests.tasks.safety.conftest import pair_rows, unsafe_rows, write_rows

FOLDER = Path(safety.__file__).parent / "configs"


@pytest.fixture
def tiny(language_model_folder, safety_files) -> list[str]:
    """Arguments that put a tiny model, local records and a short run in place."""
    model = str(language_model_folder)
    init = {"model.init_args.policy.model_name": model}
    init |= {"data.init_args.source": "files", "data.init_args.batch_size": "8"}
    init |= {f"data.init_args.{name}": path for name, path in safety_files.items()}
    init |= {"data.init_args.unsafe_schema": "labelled"}
    init |= {"model.init_args.policy.generation.max_new_tokens": "4"}
    return words(init | QUIET_RUN)


@pytest.fixture
def adapted(tiny, safety_files, tmp_path):
    """By the configuration: the arguments, with the data that it is about."""

    def arguments(name: str) -> list[str]:
        if "pku" in name:
            pairs = write_rows(tmp_path / "pairs.jsonl", pair_rows(24))
            schema = [] if name == "pku" else ["--data.init_args.unsafe_schema", "pku"]
            files = {"unsafe_file": pairs, "unsafe_val_file": "null"}
            files |= {"preparation.val_fraction": "0.25"}
            options = words({f"data.init_args.{k}": v for k, v in files.items()})
            place = tiny.index("--data.init_args.unsafe_schema")
            return tiny[:place] + tiny[place + 2 :] + options + schema
        if name == "safety/warm_start":
            return [*tiny, "--data.init_args.unsafe_schema", "null"]
        return tiny

    return arguments


@pytest.mark.parametrize("name", trained("safety"))
def test_packaged_config_trains(name, adapted, tmp_path, capsys) -> None:
    train("safety", name, [*adapted(name), "--trainer.max_epochs", "1"], tmp_path / "run")


@pytest.mark.parametrize("name", slow_tables(comparisons("safety")))
def test_packaged_rows_compare(name, adapted, runs_alone, tmp_path, capsys) -> None:
    base = [] if name in ("table", "practical", "required") else ["--config", f"safety/{name}"]
    options = {"model.init_args.evaluation.answer_in": "[]", "trainer.max_steps": "1"}
    # Without it one step is of no size.
    options |= {"model.init_args.training.optimization.warmup_ratio": "0"}
    arguments = [*base, *adapted(name), *words(options)]
    rows = comparison("safety", name, arguments, tmp_path / "results")
    constraints = ["avoid"] if "pku" in name else ["refuse", "comply"]
    for row in rows:
        for constraint in constraints:
            assert float(row[f"test/{constraint}/max"]) >= float(row[f"test/{constraint}/cvar95"])
        assert float(row["test/kl"]) >= -1e-5
    changed = {row["test/kl"] for row in rows[1:]}
    assert len(changed) > 1


def test_the_papers_table_has_the_papers_settings(tiny) -> None:
    table = yaml.safe_load((FOLDER / "compare/table.yaml").read_text())
    assert all(overlay[0] == "safety/paper" for overlay in table.values())
    found = {}
    for method in ("penalty", "average ε=-0.24", "pointwise ε=-0.08", "relaxed β=5"):
        words = [part if isinstance(part, str) else yaml.safe_dump(part) for part in table[method]]
        args = [word for part in ("safety", *words) for word in ("--config", part)]
        module = PointwiseCLI([*args, *tiny], run=False).model
        assert module.evaluation_constraints["refuse"].at_least == -0.08
        found[method] = module.constraints["refuse"].at_least, module.formulations["refuse"]
    assert found == {
        "penalty": (-0.08, Penalty(weight=5.0)),
        "average ε=-0.24": (-0.24, Average(dual_lr=1.0)),
        "pointwise ε=-0.08": (-0.08, Pointwise(alpha=1000.0, dual_lr=1.0)),
        "relaxed β=5": (-0.08, Relaxed(alpha=1000.0, beta=5.0, dual_lr=1.0)),
    }


def test_the_papers_settings_are_those_of_the_base(tiny) -> None:
    """METHOD: r 64, α 128 on q, k, v, o; 5e-4 cosine, 10 % warm-up, wd .01, batch 32, clip 1."""
    data = yaml.safe_load((FOLDER / "base.yaml").read_text())["data"]["init_args"]
    counts = {"benign_count": 1000, "benign_held_out": 4000}
    counts |= {"per_category": 4200, "held_out_per_category": 200}
    assert data["selection"].items() >= counts.items()
    assert data["batch_size"] == 32
    usual = tiny.index("--model.init_args.policy.generation.max_new_tokens")
    arguments = [*tiny[:usual], *tiny[usual + 2 :]]
    module = PointwiseCLI(["--config", "safety", *arguments], run=False).model
    assert module.lora == Lora(64, 128, 0.05, "attention")
    assert module.generation == Generation(512, sample=True, temperature=1.0, top_k=50)
    optimization = Optimization(5e-4, weight_decay=0.01, schedule="cosine", warmup_ratio=0.1)
    training = Training(optimization, gradient_clip_val=1.0, micro_batch_size=8)
    assert module.training_settings == training


def test_the_commands_of_the_docs_from_warm_start_to_predictions(
    tiny, safety_files, tmp_path, capsys
) -> None:
    """The commands of docs/safety.md, one after the other."""
    warm = tmp_path / "warm"
    arguments = [*tiny, "--data.init_args.unsafe_schema", "null", "--trainer.max_epochs", "1"]
    root = ["--trainer.default_root_dir", str(warm)]
    main(["fit", "--config", "safety", "--config", "safety/warm_start", *arguments, *root])
    model = str(warm / "model")
    assert (warm / "model" / "model.safetensors").is_file()

    run = tmp_path / "run"
    arguments = [*tiny, "--model.init_args.policy.model_name", model]
    base, checkpoint = fitted_checkpoint("safety", arguments, run, ("refuse", (16, 1)))

    capsys.readouterr()
    over = write_rows(tmp_path / "over.jsonl", [{"prompt": "How do I kill a process?"}])
    more = ["--data.init_args.over_refusal_file", over, "--ckpt_path", str(checkpoint)]
    main(["test", *base, *more])
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["test", "train", "over_refusal"] in shown
    rows = {line[0]: line[1:] for line in shown if line}
    assert len(rows["comply/max"]) == 3
    assert len(rows["refuse/max"]) == 2
    assert len(rows["refusal_rate"]) == 1  # only where answers were asked for
    assert len((run / "answers/test.jsonl").read_text().splitlines()) == 6

    asked = write_rows(tmp_path / "asked.jsonl", unsafe_rows(2, answered=False))
    answers = predictions(base, asked, checkpoint)
    assert [row["index"] for row in answers] == [0, 1]
    assert answers[1].keys() == {"index", "prompt", "answer", "refused", "cut"}
