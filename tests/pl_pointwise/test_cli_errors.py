"""What is wrong with a command line is one sentence with the remedy; own code keeps its traceback.

A sentence has to fit: each case names the exact line, its status is 2, and nothing else is shown.
"""

from __future__ import annotations

import doctest
import os
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from pl_pointwise import cli_errors, option_names
from pl_pointwise.cli import PointwiseCLI, main
from pl_pointwise.configs import config_parts
from pl_pointwise.errors import DataError

NAME = "tests.pl_pointwise.line_task"
LINE = f"--model {NAME}.LineModule --data {NAME}.LineData"
QUIET = "--trainer.accelerator cpu --trainer.logger false --trainer.enable_progress_bar false"
POINTWISE = "--model.formulation Pointwise"
(PACKAGED,) = config_parts("conversation/pointwise")
FULL_PATH = "Others go by their full path, package.module.Class."
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
    "unknown.yaml": "trainer:\n  max_epoks: 1\n",
    "type.yaml": "trainer:\n  max_epochs: three\n",
    "kind.yaml": "model:\n  init_args:\n    formulation: {class_path: Pointwize}\n",
    "field.yaml": "model:\n  init_args:\n    formulation:\n      class_path: Pointwise\n"
    "      init_args: {alhpa: 3}\n",
    "optimizer.yaml": "optimizer: {class_path: Addam}\n",
    "callback.yaml": "trainer:\n  callbacks:\n  - class_path: DualMonitr\n",
    "option.yaml": "trainer:\n  callbacks:\n  - class_path: ModelExport\n"
    "    init_args: {aftr: test}\n",
    "methods.yaml": "one: [reranker/pointwize]\n",
    "base.yaml": f"model: {NAME}.LineModule\ndata: {NAME}.LineData\n",
}
CASES = {
    "compar": "pl-pointwise: error: there is no command 'compar'. Did you mean 'compare'? --help "
    "lists them.",
    "fti": "pl-pointwise: error: there is no command 'fti'. Did you mean 'fit'? --help lists them.",
    "--config reranker": "pl-pointwise: error: a command comes first: pl-pointwise fit, validate, "
    "test or predict.",
    "fit": "pl-pointwise: error: --model must be given, on the command line or in a "
    "file (--config TASK).",
    "fit --config reranker/pointwize": "No configuration 'reranker/pointwize': neither a file nor "
    "a packaged one. Did you mean 'reranker/pointwise'? pl-pointwise --help lists them.",
    # Values and options on the command line.
    f"fit {LINE} {POINTWISE} --model.formulation.alpha -1": "Pointwise(alpha=-1.0): alpha must be "
    "a finite number > 0.",
    f"fit {LINE} {POINTWISE} --model.formulation.alpha -1 --print_config": "Pointwise(alpha=-1.0): "
    "alpha must be a finite number > 0.",
    f"fit {LINE} --trainer.max_epoks 1": "--trainer.max_epoks: there is no such option. Did you "
    "mean --trainer.max_epochs?",
    f"fit {LINE} --trainer.max_epoch 1": "--trainer.max_epoch: there is no such option. Did you "
    "mean --trainer.max_epochs?",
    f"fit {LINE} --modle.tolerance 1": "--modle.tolerance: there is no such option. Did you mean "
    "--model.tolerance?",
    f"fit {LINE} --trainer.max_epochs three": "--trainer.max_epochs: 'three' is not a whole "
    "number.",
    f"fit {LINE} --model.tolerance wide": "--model.tolerance: 'wide' is not a number.",
    "fit --config reranker --model.lern_rate 1": "--model.lern_rate: there is no such option. Did "
    "you mean --model.training.optimization.learning_rate?",
    f"fit {LINE} {POINTWISE} --model.formulation.alhpa 1": "--model.formulation.alhpa: there is no "
    "such option. Did you mean --model.formulation.alpha?",
    "fit --config when2call --model.policy.scoring_method fast": "--model.policy.scoring_method: "
    "'fast' is not one of shared_prompt, chunked, plain or auto.",
    "fit --config when2call --model.policy.lora.target_module x": "--model.policy.lora."
    "target_module: there is no such option. Did you mean --model.policy.lora.target_modules?",
    "fit --config reranker --model.top_k 0 --print_config": "top_k=0: Λ counts ranks from 1, so "
    "top_k is at least 1.",
    f"fit {LINE} foo": "'foo' belongs to no option. Write options as --NAME VALUE, with quotes "
    "around a value that has blanks.",
    # Classes.
    f"fit {LINE} --model.formulation Pointwize": "--model.formulation: there is no Formulation "
    f"'Pointwize'. Did you mean 'Pointwise'? {FULL_PATH}",
    f"fit {LINE} --optimizer Addam": "--optimizer: there is no Optimizer 'Addam'. Did you mean "
    f"'Adam'? {FULL_PATH}",
    f"fit {LINE} --optimizer SGD --optimizer.lrr 0.1": "--optimizer.lrr: there is no such option. "
    "Did you mean --optimizer.lr?",
    f"fit {LINE} --trainer.callbacks+ DualMonitr": "--trainer.callbacks: there is no Callback "
    f"'DualMonitr'. Did you mean 'DualMonitor'? {FULL_PATH}",
    f"fit --model {NAME}.LineModul --data {NAME}.LineData": f"--model: {NAME} has no class "
    "'LineModul'. Did you mean 'LineModule'?",
    f"fit --model nowhere.Module --data {NAME}.LineData": "--model: nowhere.Module cannot be "
    "imported, there is no module 'nowhere'. Is its folder the current one or on PYTHONPATH, and "
    "the name right?",
    f"fit --model {NAME}.LineData --data {NAME}.LineData": f"--model: '{NAME}.LineData' is "
    "no PointwiseModule.",
    # Files.
    f"fit {LINE} --config mthods.yaml": "--config mthods.yaml: there is no such file. Did you mean "
    "'methods.yaml'?",
    f"fit {LINE} --config syntax.yaml": "syntax.yaml, line 2: this is not YAML (",
    f"fit {LINE} --config list.yaml": "list.yaml: a configuration maps names to values, and this "
    "is a list.",
    "fit --config nested.yaml": "nested.yaml, line 7, model.training.optimization.lerning_rate: "
    "there is no such option. Did you mean learning_rate?",
    "fit --config nested.yaml --print_config": "nested.yaml, line 7, model.training.optimization."
    "lerning_rate: there is no such option. Did you mean learning_rate?",
    f"fit {LINE} --config unknown.yaml": "unknown.yaml, line 2, trainer.max_epoks: there is no "
    "such option. Did you mean max_epochs?",
    f"fit {LINE} --config type.yaml": "type.yaml, line 2, trainer.max_epochs: 'three' is not a "
    "whole number.",
    f"fit {LINE} --config kind.yaml": "kind.yaml, line 3, model.formulation: there is no "
    f"Formulation 'Pointwize'. Did you mean 'Pointwise'? {FULL_PATH}",
    f"fit {LINE} --config field.yaml": "field.yaml, line 5, model.formulation.alhpa: there is no "
    "such option. Did you mean alpha?",
    f"fit {LINE} --config optimizer.yaml": "optimizer.yaml, line 1, optimizer: there is no "
    f"Optimizer 'Addam'. Did you mean 'Adam'? {FULL_PATH}",
    f"fit {LINE} --config callback.yaml": "callback.yaml, line 2, trainer.callbacks: there is no "
    f"Callback 'DualMonitr'. Did you mean 'DualMonitor'? {FULL_PATH}",
    f"fit {LINE} --config option.yaml": "option.yaml, line 4, trainer.callbacks.aftr: there is no "
    "such option. Did you mean after?",
    "fit --config base": "No configuration 'base': neither a file nor a packaged one. Did you mean "
    "'base.yaml'? pl-pointwise --help lists them.",
    "fit --config conversation/pointwise": f"{PACKAGED}, line 2, model: --constraints must be "
    "given, on the command line or in a file (--config TASK). conversation/pointwise goes on top "
    "of its base: --config conversation --config conversation/pointwise.",
    f"test {LINE} {QUIET} --ckpt_path base.yaml": "--ckpt_path base.yaml is a configuration, which "
    "--config takes. A checkpoint ends in .ckpt.",
    f"fit {LINE} --trainer.accelerator mps": "--trainer.accelerator mps: torch finds none on this "
    "machine. Give cpu, or auto, which takes what there is.",
    f"fit {LINE} {QUIET} --data.batch_size 0": "batch_size=0: give at least 1 sample.",
    f"fit --model {NAME}.LineModule {QUIET} --data LightningDataModule": "LightningDataModule has "
    "no train_dataloader(): define it there.",
    f"fit {LINE} --ckpt_path missing.ckpt": "--ckpt_path missing.ckpt: there is no such file.",
    "fit --config reranker --model.model_name ./nomodel": "./nomodel: there is no such folder. "
    "Give a folder with a model, or its name on the hub.",
    # compare.
    "compare --config base.yaml": "give --output: folder for runs and results",
    "compare --config base.yaml --output out --seeds a": "--seeds: 'a' is not a whole number.",
    "compare --config base.yaml --output out --jobs x": "--jobs: x: must be a whole number, at "
    "least 1",
    "compare --config base.yaml --output out --seed 1": "--seed: there is no such option. Did you "
    "mean --seeds? Nothing was run.",
    "compare --config base.yaml --output out --trainer.max_epoks 1": "--trainer.max_epoks: there "
    "is no such option. Did you mean --trainer.max_epochs? Nothing was run.",
    "compare --config base.yaml --output out --set model.toleranc=1": "--model.toleranc: there is "
    "no such option. Did you mean --model.tolerance? Nothing was run.",
    "compare --config base.yaml --output out --require nonsense": "'nonsense' is no requirement. "
    'Write "relevance: violated <= 0.05", "relevance: q90 <= 0.5", "mcq/tool_call: violated <= '
    '0.1" or "over_refusal <= 0.05".',
    "compare --config base.yaml --output out --methods empty.yaml": "empty.yaml is empty: write a "
    "line NAME: OVERLAY for each method, pointwise: reranker/pointwise for one.",
    "compare --config base.yaml --output out --methods methods.yaml": "No configuration "
    "'reranker/pointwize': neither a file nor a packaged one. Did you mean 'reranker/pointwise'? "
    "pl-pointwise --help lists them. Nothing was run.",
    "compare --config base.yaml --output out --methods mthods.yaml": "--methods mthods.yaml: there "
    "is no such file. Did you mean 'methods.yaml'?",
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
    lines = [line for line in lines if "No seed found" not in line]  # Lightning's, before it.
    assert len(lines) == 1
    program, _, sentence = lines[0].partition("error: ")
    expected = CASES[command].rpartition("error: ")[2]
    assert sentence == expected or (expected.endswith("(") and sentence.startswith(expected))
    assert program.startswith("pl-pointwise")
    assert not (folder / "out").exists()


def test_doctests_pass() -> None:
    for module in (cli_errors, option_names):
        assert doctest.testmod(module).failed == 0


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
from {NAME} import LineData as Data, LineModule

class Breaks(LineModule):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.check(width)

    def check(self, width):
        assert_wide(width)

def assert_wide(width):
    raise {{error}}
"""


@pytest.fixture
def own(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    yield folder / "own_module.py"
    sys.modules.pop("own_module", None)


@pytest.mark.parametrize("error", ["ValueError('width 3 is too small')", "ImportError('no cuda')"])
def test_an_error_of_own_code_is_shown_from_that_code_on(error, own, capsys) -> None:
    own.write_text(OWN.format(error=error))
    text = refused(f"fit {QUIET} --model own_module.Breaks --data {NAME}.LineData", capsys)
    assert [line.strip() for line in text.splitlines() if "File" in line] == [
        f'File "{own}", line {number}, in {name}'
        for number, name in ((7, "__init__"), (10, "check"), (13, "assert_wide"))
    ]
    assert error.partition("'")[2].rstrip("')") in text.splitlines()[-1]
    assert "jsonargparse" not in text
    assert "Namespace" not in text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nothing_of_this_name", "NameError: name 'nothing_of_this_name' is not defined"),
        ("import os; os.no_such_thing", "AttributeError: module 'os' has no attribute"),
        ("def f(:", "SyntaxError: invalid syntax"),
    ],
)
def test_an_error_while_own_code_is_imported_is_shown(line, said, own, capsys) -> None:
    own.write_text(f"import torch\n{line}\n")
    text = refused(f"fit {QUIET} --model own_module.Model --data {NAME}.LineData", capsys)
    last = text.splitlines()[-1]
    assert last.startswith(f"pl-pointwise fit: error: --model: {said}")
    assert "own_module.py, line 2" in last
    assert (f'File "{own}", line 2' in text) == (not said.startswith("SyntaxError"))
    assert len(text.splitlines()) < 8


def test_what_is_a_bug_in_own_code_keeps_its_exception(own) -> None:
    own.write_text(OWN.format(error="ZeroDivisionError('here')"))
    with pytest.raises(ZeroDivisionError, match="here") as raised:
        main(shlex.split(f"fit {QUIET} --model own_module.Breaks --data {NAME}.LineData"))
    assert raised.traceback[-1].path == own


def test_in_python_the_error_is_the_constructors(folder) -> None:
    words = shlex.split(f"{LINE} {POINTWISE} --model.formulation.alpha -1")
    with pytest.raises(ValueError, match=r"^Pointwise\(alpha=-1.0\): alpha must be"):
        PointwiseCLI(words, run=False)


def test_an_error_of_the_data_during_a_run_is_one_line(folder, capsys, monkeypatch) -> None:
    from tests.pl_pointwise.line_task import LineData

    def setup(self, stage):
        raise DataError("train.jsonl, line 3: no label. Give one.")

    monkeypatch.setattr(LineData, "setup", setup)
    monkeypatch.setitem(LineData.setup.__globals__, "__name__", "pl_pointwise.tasks")
    text = refused(f"fit {LINE} {QUIET}", capsys)
    lines = [line for line in text.splitlines() if line.startswith(("Traceback", "pl-pointwise"))]
    assert lines == ["pl-pointwise fit: error: train.jsonl, line 3: no label. Give one."]


def test_a_configuration_that_a_fit_takes_is_printed(folder, capsys) -> None:
    for words in (f"{LINE} {POINTWISE}", "--config reranker", ""):
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(f"fit {words} --print_config"))
        assert ended.value.code == 0
        assert "trainer" in yaml.safe_load(capsys.readouterr().out)
