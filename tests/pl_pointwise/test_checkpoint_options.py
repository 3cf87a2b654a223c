"""What a checkpoint says of the module, and what the command line says, over it."""

from __future__ import annotations

import doctest
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from pl_pointwise import Pointwise, checkpoint_options, configs
from pl_pointwise.checkpoint_options import differences
from pl_pointwise.cli import PointwiseCLI, main
from tests.pl_pointwise.line_task import LineData, LineModule

NAME = "tests.pl_pointwise.line_task"
TASK = ["--model", f"{NAME}.LineModule", "--data", f"{NAME}.LineData"]
TRAINER = ["--trainer.max_epochs", "2", "--trainer.accelerator", "cpu", "--trainer.logger", "false"]
TRAINER += ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
TOLERANCE = "--model.init_args.tolerance"


def train(folder: Path, *options: str) -> Path:
    """A checkpoint of the command line with tolerance 0.3 and α = 2."""
    root = ["--trainer.default_root_dir", str(folder)]
    alpha = ["--model.formulation", "Pointwise", "--model.formulation.alpha", "2"]
    main(["fit", *TASK, *TRAINER, *root, *alpha, TOLERANCE, "0.3", *options])
    (path,) = folder.rglob("*.ckpt")
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("run"))


@pytest.fixture
def seen(monkeypatch, tmp_path):
    """(arguments of the command) → the module it made, what it warned of, its config.yaml."""
    made = []
    before = PointwiseCLI.after_instantiate_classes

    def note(self):
        made.append(self.model)
        before(self)

    monkeypatch.setattr(PointwiseCLI, "after_instantiate_classes", note)

    def run(*args: str) -> tuple[LineModule, list[str], str]:
        root = ["--trainer.default_root_dir", str(tmp_path / "out")]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            main([args[0], *TRAINER, *root, *args[1:]])
        told = [str(each.message) for each in caught if "ckpt" in str(each.message)]
        return made[-1], told, (tmp_path / "out/config.yaml").read_text()

    return run


@pytest.mark.parametrize("command", ["validate", "test"])
def test_an_option_wins_over_the_checkpoint(command, checkpoint, seen) -> None:
    path = ["--ckpt_path", str(checkpoint)]
    module, told, config = seen(command, *TASK, TOLERANCE, "0.7", *path)
    assert module.constraints["fit"].at_most == 0.7
    assert module.formulations["fit"] == Pointwise(alpha=2.0)  # asked of nobody: the checkpoint's
    (warning,) = [each for each in told if "command line" in each]
    assert "model.init_args.tolerance 0.7 (its 0.3)" in warning
    assert "alpha" not in warning
    head = [line for line in config.splitlines() if line.startswith("#")]
    assert any(str(checkpoint) in line for line in head)
    assert [line for line in head if "but" in line] == [
        "#   but model.init_args.tolerance: 0.7, in place of its 0.3"
    ]
    assert yaml.safe_load(config)["model"]["init_args"]["tolerance"] == 0.7


def test_nothing_asked_for_is_the_checkpoints(checkpoint, seen) -> None:
    module, told, config = seen("test", *TASK, "--ckpt_path", str(checkpoint))
    assert module.constraints["fit"].at_most == 0.3
    assert not [each for each in told if "command line" in each]
    assert "but" not in config.partition("seed_everything")[0]


def test_a_nested_option_leaves_its_neighbours(checkpoint, seen) -> None:
    nested = ["--model.formulation", "Pointwise", "--model.formulation.dual_lr", "9"]
    module, _, _ = seen("test", *TASK, *nested, "--ckpt_path", str(checkpoint))
    assert module.formulations["fit"] == Pointwise(alpha=2.0, dual_lr=9.0)


@pytest.mark.parametrize("where", ["before", "behind"])
def test_a_file_wins_over_the_checkpoint_and_a_base_does_not(
    where, checkpoint, seen, tmp_path, monkeypatch
) -> None:
    """``--config TASK`` says what a task starts with; another file is asked for."""
    base = tmp_path / "base.yaml"
    init = {"tolerance": 0.9, "formulation": {"class_path": "Pointwise", "init_args": {"alpha": 7}}}
    model = {"class_path": f"{NAME}.LineModule", "init_args": init}
    base.write_text(yaml.safe_dump({"model": model, "data": f"{NAME}.LineData"}))
    packaged = {"line": [str(base)]}
    for place in (configs, checkpoint_options):
        monkeypatch.setattr(place, "packaged_configs", lambda: packaged)
    path = ["--ckpt_path", str(checkpoint)]
    module, _, _ = seen("test", "--config", "line", *path)
    assert module.constraints["fit"].at_most == 0.3
    assert module.formulations["fit"] == Pointwise(alpha=2.0)

    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump({"model": {"init_args": {"tolerance": 0.8}}}))
    files = ["--config", "line", f"--config={own}"]
    module, told, _ = seen("test", *(files + path if where == "behind" else path + files))
    assert module.constraints["fit"].at_most == 0.8
    assert module.formulations["fit"] == Pointwise(alpha=2.0)
    assert "model.init_args.tolerance 0.8 (its 0.3)" in told[0]


def test_the_checkpoints_path_may_be_in_a_file(checkpoint, seen, tmp_path) -> None:
    config = tmp_path / "where.yaml"
    config.write_text(yaml.safe_dump({"ckpt_path": str(checkpoint)}))
    module, _, _ = seen("test", "--config", str(config), *TASK)
    assert module.constraints["fit"].at_most == 0.3


def test_predict_takes_an_option_too(checkpoint, seen, monkeypatch) -> None:
    loader = partial(DataLoader, batch_size=5)
    monkeypatch.setattr(
        LineData, "predict_dataloader", lambda self: loader(self.datasets["val"]), raising=False
    )
    module, _, _ = seen("predict", *TASK, TOLERANCE, "0.7", "--ckpt_path", str(checkpoint))
    assert module.constraints["fit"].at_most == 0.7


def test_a_resumed_fit_says_once_what_differs(checkpoint, seen, caplog) -> None:
    more = ["--trainer.max_epochs", "3", "--ckpt_path", str(checkpoint)]
    module, told, config = seen("fit", *TASK, *more, TOLERANCE, "0.7")
    assert module.constraints["fit"].at_most == 0.7
    assert module.formulations["fit"] == Pointwise(alpha=2.0)
    assert not [each for each in told if "command line" in each]
    (warning,) = [r.getMessage() for r in caplog.records if "other settings" in r.getMessage()]
    assert "tolerance (0.3, now 0.7)" in warning
    assert "in place of its 0.3" in config


def test_a_checkpoint_of_a_notebook_goes_on_the_command_line(seen, tmp_path) -> None:
    """Lightning put its arguments where a class had to be, and ended in a parser's error."""
    module = LineModule(Pointwise(alpha=2.0), tolerance=0.3)
    trainer = Trainer(max_epochs=1, logger=False, accelerator="cpu", enable_progress_bar=False,
                      default_root_dir=tmp_path, enable_model_summary=False)  # fmt: skip
    trainer.fit(module, LineData(batch_size=5))
    path = tmp_path / "notebook.ckpt"
    trainer.save_checkpoint(path)
    found, _, _ = seen("test", *TASK, "--ckpt_path", str(path))
    assert found.constraints["fit"].at_most == 0.3
    assert torch.equal(found.weight, module.weight)


def test_a_checkpoint_of_another_class_is_refused(checkpoint, tmp_path, capsys) -> None:
    other = ["--model", "tests.pl_pointwise.toy.Toy", *TASK[2:]]
    with pytest.raises(SystemExit):
        main(["test", *other, *TRAINER, "--ckpt_path", str(checkpoint)])
    assert "is of a LineModule, and the command line asks for a Toy" in capsys.readouterr().err


def test_an_option_that_is_gone_is_named(checkpoint, seen, tmp_path) -> None:
    content = torch.load(checkpoint, weights_only=True)
    content["hyper_parameters"] |= {"gone": 1, "tolerance": 0.4}
    older = tmp_path / "older.ckpt"
    torch.save(content, older)
    module, told, _ = seen("test", *TASK, "--ckpt_path", str(older))
    assert module.constraints["fit"].at_most == 0.4
    assert any("gone (no option of LineModule now)" in each for each in told)


def test_an_option_newer_than_the_checkpoint_is_told_apart(checkpoint, seen, tmp_path) -> None:
    content = torch.load(checkpoint, weights_only=True)
    del content["hyper_parameters"]["fail"]
    older = tmp_path / "older.ckpt"
    torch.save(content, older)
    _, _, config = seen("test", *TASK, "--ckpt_path", str(older))
    assert "#   but model.init_args.fail, which it does not hold\n" in config


def test_load_from_checkpoint_names_an_argument_nobody_has(checkpoint) -> None:
    """Lightning leaves it out, so that a misspelt argument is the checkpoint's."""
    found = LineModule.load_from_checkpoint(checkpoint, weights_only=True, tolerance=0.7)
    assert found.constraints["fit"].at_most == 0.7
    with pytest.raises(TypeError, match=r"no argument 'tolerence'.*It takes.*tolerance"):
        LineModule.load_from_checkpoint(checkpoint, weights_only=True, tolerence=0.7)


def test_classes_are_compared_by_name_and_values_by_dotted_name() -> None:
    assert doctest.testmod(checkpoint_options).failed == 0
    short, long = ({"class_path": f"pl_pointwise{m}.Pointwise"} for m in ("", ".formulations"))
    assert differences(short, long) == {}
    assert differences(short, {"class_path": "pl_pointwise.Relaxed"})
