"""The model card of an export holds the numbers of the module, and no folder of the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from pl_pointwise import Constraint, Pointwise, PointwiseModule
from pl_pointwise.certificates import certify
from pl_pointwise.evaluation import SampleViolations
from pl_pointwise.model_card import public_name, write_card
from pl_pointwise.task import notes_of
from tests.pl_pointwise.line_task import LineData, LineModule
from tests.pl_pointwise.toy import trainer


def fitted(folder: Path, formulation: Any = None, **options: Any) -> LineModule:
    module = LineModule(formulation)
    options = {"max_epochs": 3, "num_sanity_val_steps": 2, **options}
    trainer(default_root_dir=folder, **options).fit(module, LineData(batch_size=2))
    return module


def card(
    module: LineModule, folder: Path, base_model: str | None = "owner/base"
) -> ModelCard:
    path = write_card(
        module,
        folder,
        library_name="peft",
        pipeline_tag="text-generation",
        base_model=base_model,
        usage="import torch",
    )
    return ModelCard.load(path)


def row(text: str, first: str, after: str) -> list[str]:
    """The cells of the table row that begins with ``first``, below the heading ``after``."""
    lines = text.partition(f"## {after}")[2].splitlines()
    (line,) = [line for line in lines if line.startswith(f"| {first} |")][:1]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_metadata_are_the_hubs_and_the_training_is_summed_up(tmp_path) -> None:
    module = fitted(tmp_path, Pointwise(alpha=2.0, dual_lr=1.0))
    found = card(module, tmp_path)
    assert (found.data.base_model, found.data.library_name) == ("owner/base", "peft")
    assert found.data.pipeline_tag == "text-generation"
    assert "pl-pointwise" in found.data.tags
    text = found.text
    assert row(text, "fit", "Requirements")[1:3] == ["≤ 0.1", "≤ 0.1"]
    assert "`Pointwise(alpha=2.0, dual_lr=1.0" in text
    assert "- epochs: 3\n" in text
    assert "- training samples: 5\n" in text
    assert "- optimizer: AdamW, learning rate" in text


def test_held_out_violations_come_with_their_certificate_and_the_training_ones_do_not(
    tmp_path,
) -> None:
    module = fitted(tmp_path, Pointwise())
    text = card(module, tmp_path).text
    assert "### val" in text
    assert "These are validation data" in text
    module.trainer.test(module, LineData(batch_size=2), verbose=False)
    text = card(module, tmp_path).text
    held_out = module.violations["test"]["fit"]
    cells = row(text, "fit", "Held-out violations")
    assert cells[1:3] == [f"{held_out.mean():.3g}", f"{held_out.max():.3g}"]
    assert certify(held_out).statement() in text
    assert "### test" in text
    assert "### train" not in text
    assert "Metrics of the same pass: objective" in text
    notes_of(module).certificate = "What compare --require certified."
    # Which holds for the choice, too: it stands alone.
    text = card(module, tmp_path).text
    assert "What compare --require certified." in text
    assert "Clopper" not in text


def test_a_sanity_check_is_no_evaluation(tmp_path) -> None:
    """Its two batches were seen by weights that had not been trained."""
    module = fitted(tmp_path, check_val_every_n_epoch=5)
    assert module.violations == {}
    assert module.evaluated == {}
    assert "measures nothing itself" in card(module, tmp_path).text


def test_violations_that_are_nan_have_no_certificate(tmp_path) -> None:
    module = fitted(tmp_path)
    module.evaluated["val"]["fit"].violation[0] = torch.nan
    assert "No certificate: 1 of 5 violations are NaN" in card(module, tmp_path).text


def test_both_bounds_are_shown(tmp_path) -> None:
    module = fitted(tmp_path, Pointwise())
    module.constraints = {"fit": Constraint(at_least=-1.0, at_most=2.0)}
    text = card(module, tmp_path).text
    assert row(text, "fit", "Requirements")[1:3] == ["≥ -1 and ≤ 2", "≤ 0.1"]
    module.constraints = {"fit": Constraint(equals=0.5)}
    text = card(module, tmp_path, base_model=None).text
    assert row(text, "fit", "Requirements")[1] == "= 0.5"


def test_a_model_that_was_only_tested_says_nothing_of_a_fit_it_did_not_see(
    tmp_path,
) -> None:
    path = tmp_path / "fitted.ckpt"
    trained = fitted(tmp_path, Pointwise())
    trained.trainer.save_checkpoint(path)
    module, data = LineModule(Pointwise()), LineData(batch_size=2)
    trainer().test(module, data, ckpt_path=path, weights_only=True, verbose=False)
    text = card(module, tmp_path).text
    assert f"- steps: {trained.trainer.global_step}\n" in text
    assert "- epochs" not in text


def test_the_share_of_samples_comes_first_and_of_values_where_they_differ(
    tmp_path,
) -> None:
    module = fitted(tmp_path)
    found = module.evaluated["val"]["fit"]
    one = row(card(module, tmp_path).text, "fit", "Held-out violations")
    assert one[4] == ""
    two = torch.tensor([[1.0, -1.0], [-1.0, 2.0], [-1.0, -1.0], [-1.0, -1.0]])
    module.evaluated["val"]["fit"] = SampleViolations(torch.arange(4), two, two.bool())
    assert [*module.evaluated["val"]["fit"].statistics()][2:4] == [
        "violated_samples",
        "violated",
    ]
    assert row(card(module, tmp_path).text, "fit", "Held-out violations")[3:5] == [
        "0.5",
        "0.25",
    ]
    assert len(found.index) == 5


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("owner/model-1.5", "owner/model-1.5"),
        ("/absolute/folder", None),
        ("a/b/c", None),
        ("package:name/model", None),
        ("here", None),
    ],
)
def test_only_a_name_on_the_hub_is_public(model, name, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert public_name(model) == name


class TwoTerms(LineModule):
    """With a constraint that applies to no sample."""

    def __init__(self, constraints: Any) -> None:
        PointwiseModule.__init__(self, formulation=Pointwise(), constraints=constraints)
        self.weight, self.fail = torch.nn.Parameter(torch.zeros(2)), False

    def constraint_values(self, outputs: Any, batch: Any) -> Any:
        return {**super().constraint_values(outputs, batch), "idle": outputs}

    def membership(self, batch: Any) -> Any:
        return {"idle": torch.zeros(len(batch["index"]), dtype=torch.bool)}


def test_a_requirement_that_applied_to_nothing_is_none_of_the_model(tmp_path) -> None:
    """Three of four lines of the table of `keep` were about no sample at all."""
    constraints = {"fit": Constraint(at_most=0.1), "idle": Constraint(at_most=1.0)}
    module = TwoTerms(constraints)
    trainer(default_root_dir=tmp_path, max_epochs=2).fit(module, LineData(batch_size=2))
    text = card(module, tmp_path).text
    assert "| fit |" in text
    assert "| idle |" not in text
    assert "without a training sample that they apply to: idle." in text
    before = card(TwoTerms(constraints), tmp_path).text  # Of no fit it is not known.
    assert "| idle |" in before


def test_all_violated_is_no_bound_of_a_hundred_percent() -> None:
    statement = certify(torch.ones(3)).statement()
    assert "100 %)" in statement
    assert "at most 100 %" not in statement
    assert "No bound below 100 % holds" in statement
