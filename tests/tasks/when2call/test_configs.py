"""Every packaged When2Call configuration runs, in process, on a tiny model and local records.

Only the model, the data and the length of the run are replaced; every other key is the shipped one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pl_pointwise import Pointwise, Relaxed
from pl_pointwise.cli import PointwiseCLI, main
from pl_pointwise.tasks import when2call
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
    write_rows,
)
from tests.tasks.when2call.conftest import choice_rows

FOLDER = Path(when2call.__file__).parent / "configs"

PAIRS = [{"system": "Add.", "input": f"{i} + 1?", "chosen": f"{i + 1}", "rejected": "Hm."}
         for i in range(6)]  # fmt: skip


@pytest.fixture
def tiny(language_model_folder, when2call_files, tmp_path) -> list[str]:
    """Arguments that put a tiny model, local records and a short run in place."""
    model = str(language_model_folder)
    init = {"model.init_args.policy.model_name": model}
    init |= {"data.init_args.source": "files", "data.init_args.batch_size": "4"}
    init |= {f"data.init_args.{name}": path for name, path in when2call_files.items()}
    return words(init | {"trainer.limit_train_batches": "2"} | QUIET_RUN)


@pytest.fixture
def tiny_pairs(tiny, tmp_path) -> list[str]:
    """The same with plain preference pairs."""
    path = str(write_rows(tmp_path / "pairs.jsonl", PAIRS))
    files = {"train_file": path, "val_file": "null", "mcq_file": "null"}
    files |= {"preparation.val_fraction": "0.2"}
    return tiny + words({f"data.init_args.{name}": value for name, value in files.items()})


@pytest.mark.parametrize("name", trained("when2call"))
def test_packaged_config_trains(name, tiny, tiny_pairs, tmp_path, capsys) -> None:
    arguments = tiny_pairs if name == "when2call/orca" else tiny
    train("when2call", name, [*arguments, "--trainer.max_epochs", "1"], tmp_path / "run")


@pytest.mark.parametrize("name", slow_tables(comparisons("when2call")))
def test_packaged_rows_compare(name, tiny, tiny_pairs, runs_alone, tmp_path, capsys) -> None:
    orca = name == "orca"
    arguments = ["--config", "when2call/orca", *tiny_pairs] if orca else tiny
    arguments = [*arguments, "--trainer.max_steps", "1"]
    for row in comparison("when2call", name, arguments, tmp_path / "results"):
        accuracies = [float(row[f"{stage}/pairwise_accuracy"]) for stage in ("test", "train")]
        assert all(0 <= accuracy <= 1 for accuracy in accuracies)
        if not orca:
            assert 0 <= float(row["mcq/macro_f1"]) <= 1
            assert float(row["test/rejected/max"]) >= float(row["test/rejected/cvar95"])


def test_the_papers_table_has_the_papers_settings(tiny) -> None:
    table = yaml.safe_load((FOLDER / "compare/table.yaml").read_text())
    found = {}
    for name in ("pointwise", "relaxed"):
        args = [word for part in ("when2call", *table[name]) for word in ("--config", part)]
        module = PointwiseCLI([*args, *tiny], run=False).model
        assert module.constraints["rejected"].at_most == -20
        found[name] = module.formulations["chosen"]
    assert found["pointwise"] == Pointwise(alpha=10.0, dual_lr=0.1)
    assert found["relaxed"] == Relaxed(alpha=10.0, beta=10.0, dual_lr=1.0)


def test_fit_then_test_then_predict_from_the_checkpoint(tiny, tmp_path, capsys) -> None:
    """The commands of docs/when2call.md, one after the other, the checkpoint between them."""
    tiny += ["--data.init_args.group_rejected", "true"]
    base, checkpoint = fitted_checkpoint("when2call", tiny, tmp_path, ("rejected", (6, 2)))

    main(["test", *base, "--ckpt_path", str(checkpoint)])
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["test", "train", "mcq"] in shown
    rows = {line[0]: line[1:] for line in shown if line}
    assert len(rows["rejected/max"]) == 3
    assert len(rows["macro_f1"]) == 1  # of multiple choice alone

    asked = [{name: choice_rows(1)[0][name] for name in ("question", "tools")}]
    questions = write_rows(tmp_path / "questions.jsonl", asked)
    more = ["--model.init_args.policy.generation.max_new_tokens", "5", "--accept_differences"]
    (generated,) = predictions(base, questions, checkpoint, *more)
    assert isinstance(generated["answer"], str)
