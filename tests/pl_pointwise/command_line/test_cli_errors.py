"""What is wrong with a command line is one sentence with the remedy, and of own code the place.

Each case says what the line names; its status is 2, and nothing else is shown.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from pl_pointwise.cli import PointwiseCLI, main
from pl_pointwise.command_line import cli_errors
from pl_pointwise.errors import DataError

NAME = "tests.pl_pointwise.line_task"
LINE = f"--model {NAME}.LineModule --data {NAME}.LineData"
QUIET = "--trainer.accelerator cpu --trainer.logger false --trainer.enable_progress_bar false"
POINTWISE = "--model.formulation Pointwise"
FILES = {
    "syntax.yaml": "model: {class_path: [a\n  b: 3\n",
    "list.yaml": "- 1\n",
    "empty.yaml": "",
    "nested.yaml": f"""
model:
  class_path: pl_pointwise.tasks.RerankerModule
  init_args:
    training:
      optimization:
        lerning_rate: 0.1
data: {NAME}.LineData
""",
    "called.yaml": "model: {init_args: {formulation: Pointwise()}}\n",
    "twice.yaml": "trainer: {max_epochs: 1}\nseed_everything: 1\ntrainer: {accelerator: cpu}\n",
    "base.yaml": f"model: {NAME}.LineModule\ndata: {NAME}.LineData\n",
}
CASES = {
    "compar": ["'compar'", "compare"],
    "fit": ["fit.model", "--config TASK"],
    "fit --config reranker/pointwize": [
        "'reranker/pointwize'",
        "'reranker/pointwise'?",
    ],
    # Values and options on the command line.
    f"fit {LINE} {POINTWISE} --model.formulation.alpha -1": [
        "error: Pointwise(alpha=-1.0): alpha"
    ],
    f"fit {LINE} --trainer.max_epoks 1": [
        "--trainer.max_epoks",
        "'trainer.max_epochs'",
    ],
    f"fit {LINE} --model.tolerance wide": [
        "error: --model.tolerance: ",
        "'float'",
        "wide",
    ],
    "fit --config reranker --model.lern_rate 1": [
        "'lern_rate'",
        "optimization.learning_rate",
    ],
    f"fit {LINE} {POINTWISE} --model.formulation.alhpa 1": [
        "error: --model.formulation: ",
        "'alhpa'",
        "'alpha'",
    ],
    "fit --config when2call --model.policy.scoring_method fast": [
        "error: --model.policy.scoring_method: ",
        "'shared_prompt'",
        "fast",
    ],
    # Classes.
    f"fit --model {NAME}.LineModul --data {NAME}.LineData": ["--model: ", "LineModul"],
    f"fit --model {NAME}.LineData --data {NAME}.LineData": [
        "--model: ",
        "PointwiseModule",
    ],
    f"fit {LINE} --trainer.callbacks+ DualMonitr": ["Did you mean 'DualMonitor'?"],
    f"fit {LINE} --trainer.callbacks EarlyStoping": ["Did you mean 'EarlyStopping'?"],
    f"fit {LINE} --optimizer Adm": ["Did you mean 'Adam'?"],
    f"fit {LINE} --lr_scheduler StepL": ["Did you mean 'StepLR'?"],
    "fit --model RerankrModule": ["Did you mean 'RerankerModule'?"],
    f"fit {LINE} --model.formulation Pointwse": ["Did you mean 'Pointwise'?"],
    f"fit {LINE} --config called.yaml": [
        "--model.formulation: ",
        "Pointwise(). YAML calls nothing: write Pointwise, or class_path: Pointwise with",
    ],
    f"fit {LINE} --trainer.callbacks+ DualMonitor()": [
        "write DualMonitor, or class_path"
    ],
    f"fit {LINE} --optimizer.lr 1": [
        "The rate is --model.init_args.training.optimization."
    ],
    f"fit {LINE} --model.learning_rate 1": [
        "The rate is --model.init_args.training.optim"
    ],
    # Files.
    f"fit {LINE} --config syntax.yaml": ["syntax.yaml", "line 2"],
    f"fit {LINE} --config list.yaml": ["list.yaml", "a list"],
    "fit --config nested.yaml": [
        "error: --model: ",
        "optimization.lerning_rate'",
        "--model.init_args.training.optimization.learning_rate",
    ],
    "fit --config reranker/average": ["--config reranker --config reranker/average"],
    "fit --config digits/penalty_hinge -c digits": [
        "--config digits --config digits/penalty_hinge"
    ],
    f"test {LINE} {QUIET} --ckpt_path ''": ["--ckpt_path '' names no file"],
    f"test {LINE} {QUIET} --ckpt_path base.yaml": ["base.yaml is a configuration"],
    f"predict {LINE} {QUIET} --ckpt_path last": ["--ckpt_path 'last' names no file"],
    f"fit {LINE} --trainer.logger false --ckpt_path last": [
        "with dirpath and save_last: true"
    ],
    f"fit {LINE} {QUIET} --ckpt_path best": ["--ckpt_path 'best' names no file"],
    f"fit {LINE} {QUIET} --data.batch_size 0": ["error: batch_size=0: "],
    "fit --config reranker --model.model_name ./nomodel": [
        "./nomodel: there is no such folder."
    ],
    # compare.
    "compare --config base.yaml --output out --seed 1": [
        "unrecognized arguments: --seed 1"
    ],
    "compare --config base.yaml --output out --modle 1": [
        "--modle 1",
        "nothing was run",
    ],
    f"fit {LINE} --config twice.yaml": ["twice.yaml", "line 3: 'trainer' stands twice"],
    "compare --config base.yaml --output out --methods no.yaml": [
        "error: No configuration 'no.y"
    ],
    "compare --config digits/average --config digits --output out": [
        "--config digits --config d"
    ],
    "compare --config base.yaml --output out --set model.toleranc=1": [
        "'toleranc'",
        "'tolerance'",
    ],
    "compare --config base.yaml --output out --only 0": ["this comparison has 1 runs"],
    "compare --config base.yaml --output out --only 2": ["this comparison has 1 runs"],
    "compare --config base.yaml --output out --require nonsense": [
        "'nonsense'",
        "violated <= 0.",
    ],
    "compare --config base.yaml --output out --methods empty.yaml": [
        "empty.yaml is empty"
    ],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(cli_errors.DEBUG, raising=False)
    return tmp_path


def refused(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(command))
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err


@pytest.mark.parametrize("command", CASES)
def test_what_is_wrong_is_one_line(command, folder, capsys) -> None:
    lines = refused(command, capsys).splitlines()
    # Lightning's, before it.
    lines = [line for line in lines if "No seed found" not in line]
    assert len(lines) == 1
    assert lines[0].startswith("pl-pointwise")
    assert not [part for part in CASES[command] if part not in lines[0]], lines[0]
    assert lines[0].count("Did you mean") + lines[0].count("The rate is") <= 1
    assert not (folder / "out").exists()


def test_debug_shows_everything(folder, capsys, monkeypatch) -> None:
    monkeypatch.setenv(cli_errors.DEBUG, "0")  # So that it is as before afterwards.
    command = f"fit {LINE} {QUIET} {POINTWISE} --debug --model.formulation.alpha -1"
    with pytest.raises(ValueError, match="alpha must be"):
        main(shlex.split(command))
    assert os.environ[cli_errors.DEBUG] == "1"
    text = refused(f"fit {LINE} --trainer.max_epoks 1", capsys)
    assert "usage:" in text
    assert len(text.splitlines()) > 20


OWN = f"""
from {NAME} import LineModule

class Breaks(LineModule):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        raise {{error}}
"""


@pytest.fixture
def own(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    yield folder / "own_module.py"
    sys.modules.pop("own_module", None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            OWN.format(error="ValueError('width 3 is too small')"),
            "width 3 is too small (--debug",
        ),
        (
            "import os; os.no_such_thing",
            "--model: module 'os' has no attribute 'no_such_thing'.",
        ),
        ("def f(:", "--model: invalid syntax (own_module.py, line 1)"),
    ],
)
def test_an_error_of_own_code_is_one_line(text, said, own, capsys) -> None:
    own.write_text(text)
    shown = refused(
        f"fit {QUIET} --model own_module.Breaks --data {NAME}.LineData", capsys
    )
    assert shown.splitlines()[-1].startswith(f"pl-pointwise fit: error: {said}")


def test_what_is_a_bug_in_own_code_keeps_its_exception(own) -> None:
    own.write_text(OWN.format(error="ZeroDivisionError('here')"))
    with pytest.raises(ZeroDivisionError, match="here") as raised:
        main(
            shlex.split(f"fit {QUIET} --model own_module.Breaks --data {NAME}.LineData")
        )
    assert raised.traceback[-1].path == own


def test_in_python_the_error_is_the_constructors(folder) -> None:
    words = shlex.split(f"{LINE} {POINTWISE} --model.formulation.alpha -1")
    with pytest.raises(ValueError, match=r"^Pointwise\(alpha=-1.0\): alpha must be"):
        PointwiseCLI(words, run=False)


def test_an_error_of_the_data_during_a_run_is_one_line(
    folder, capsys, monkeypatch
) -> None:
    from tests.pl_pointwise.line_task import LineData

    def setup(self, stage):
        raise DataError("train.jsonl, line 3: no label. Give one.")

    monkeypatch.setattr(LineData, "setup", setup)
    monkeypatch.setitem(LineData.setup.__globals__, "__name__", "pl_pointwise.tasks")
    text = refused(f"fit {LINE} {QUIET}", capsys)
    lines = [
        line
        for line in text.splitlines()
        if line.startswith(("Traceback", "pl-pointwise"))
    ]
    assert lines == [
        "pl-pointwise fit: error: train.jsonl, line 3: no label. Give one."
    ]


def test_a_configuration_is_printed(folder, capsys) -> None:
    for words in (f"{LINE} {POINTWISE}", "--config reranker", ""):
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(f"fit {words} --print_config"))
        assert ended.value.code == 0
        assert "trainer" in yaml.safe_load(capsys.readouterr().out)
