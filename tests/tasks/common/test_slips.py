"""What a newcomer types or gives on the command line, answered by cause and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel, ModernBertConfig, ModernBertModel

from pl_pointwise.cli import PointwiseCLI, main
from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.records import rows_of
from pl_pointwise.tasks.language_model.model.loading import load_language_model

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
SMALL |= {"num_hidden_layers": 1, "vocab_size": 50, "pad_token_id": 0}


def said_by(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main(arguments)
    return capsys.readouterr().err.splitlines()[-1]


def test_a_placeholder_is_no_name_on_the_hub() -> None:
    with pytest.raises(
        FileNotFoundError, match="MODEL stands in the pages' commands for a model"
    ):
        load_language_model("MODEL")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            BertLMHeadModel(BertConfig(**SMALL)),
            "no causal language model: a b",
        ),
        (ModernBertModel(ModernBertConfig(**SMALL)), "does not write texts"),
    ],
)
def test_an_encoder_is_no_policy(model: Any, said: str, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=f"{said}.*Take a (causal|model that does).*SmolLM2"
    ):
        load_language_model(str(tmp_path))


@pytest.mark.parametrize(
    ("ending", "separator", "said"),
    [
        (".csv", ";", "stands ';', .*a comma"),
        (".csv", "\t", "a comma"),
        (".tsv", ",", "a tab"),
    ],
)
def test_a_table_of_another_separator_says_which(
    ending, separator, said, tmp_path
) -> None:
    path = tmp_path / f"rows{ending}"
    path.write_text(separator.join(["prompt", "answer", "role"]) + "\na;b;c\n")
    with pytest.raises(DataError, match=f"the header is one column.*{said}"):
        list(rows_of(str(path)))


def test_a_table_of_one_column_is_read(tmp_path) -> None:
    (tmp_path / "rows.csv").write_text("prompt\nWhy?\n")
    assert [row for _, row in rows_of(str(tmp_path / "rows.csv"))] == [
        {"prompt": "Why?"}
    ]


def test_python_is_no_configuration(tmp_path, capsys) -> None:
    (tmp_path / "mine.py").write_text("class Mine: ...\n")
    said = said_by(["fit", "--config", str(tmp_path / "mine.py")], capsys)
    assert "it is Python, and a configuration is YAML" in said
    assert "{class_path: mine.YOUR_MODULE}" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without")
@pytest.mark.parametrize("accelerator", ["gpu", "cuda"])
def test_a_missing_gpu_says_what_to_take(accelerator, capsys) -> None:
    said = said_by(
        ["fit", "--config", "family", "--trainer.accelerator", accelerator], capsys
    )
    assert "this machine has no such device" in said
    assert "--trainer.accelerator cpu" in said


UNTYPED = """
from pl_pointwise import Constraint, PointwiseDataModule, PointwiseModule, Training
import torch

class Mine(PointwiseModule):
    def __init__(self, formulation, tolerance=1.0, training=None):
        super().__init__(
            formulation=formulation,
            constraints={"fit": Constraint(at_most=tolerance)},
            training=training or Training(),
        )
        self.weight = torch.nn.Parameter(torch.ones(()))

class Rows(PointwiseDataModule):
    def setup(self, stage):
        self.datasets = {"train": [{"x": 1.0}, {"x": 2.0}]}
"""
CONFIG = """
model:
  class_path: {0}.Mine
  init_args:
    formulation: {{class_path: pl_pointwise.Penalty, init_args: {{weight: 3.0, shape: hinge}}}}
    training: {{optimization: {{learning_rate: 0.25}}}}
data: {0}.Rows
"""


def test_a_constructor_without_types_takes_a_method_that_changes_a_part(
    tmp_path, monkeypatch
) -> None:
    """Its formulation lost its class: "formulation names 'init_args'", of the page's own class."""
    (tmp_path / "untyped_mine.py").write_text(UNTYPED)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.yaml").write_text(CONFIG.format("untyped_mine"))
    method = "model: {init_args: {formulation: {init_args: {weight: 7.0}}, tolerance: 0.5}}\n"
    (tmp_path / "method.yaml").write_text(method)
    words = [
        "--config",
        str(tmp_path / "mine.yaml"),
        "--config",
        str(tmp_path / "method.yaml"),
    ]
    quiet = ["--trainer.logger", "false", "--trainer.accelerator", "cpu"]
    module = PointwiseCLI([*words, *quiet], run=False).model
    formulation = module.formulations["fit"]
    assert (type(formulation).__name__, formulation.weight) == ("Penalty", 7.0)
    assert formulation.shape == "hinge"
    assert module.constraints["fit"].at_most == 0.5
    assert module.training_settings.optimization.learning_rate == 0.25
