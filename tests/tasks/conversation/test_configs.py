"""Every packaged configuration runs, in process, on a tiny model.

Only the model, the device and the length of the run are replaced, and of all but the example the
data; every other key is the shipped one.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import yaml

from pl_pointwise.cli import PointwiseCLI, main
from pl_pointwise.tasks import conversation
from tests.tasks.conftest import overlays

FOLDER = Path(conversation.__file__).parent / "configs"
COMPARISONS = sorted(path.stem for path in FOLDER.glob("compare/*.yaml"))


@pytest.fixture
def tiny(language_model_folder) -> list[str]:
    """Arguments that put a tiny model and a short run in place."""
    init = {"model.init_args.policy.model_name": str(language_model_folder)}
    init |= {"model.init_args.policy.generation.max_new_tokens": "3"}
    init |= {"trainer.accelerator": "cpu", "trainer.precision": "32-true"}
    init |= {"trainer.max_epochs": "1", "trainer.logger": "false"}
    init |= {"trainer.limit_train_batches": "2", "trainer.enable_model_summary": "false"}
    init |= {"trainer.enable_progress_bar": "false", "trainer.enable_checkpointing": "false"}
    # The tiny tokenizer has a token a byte.
    init |= {"data.init_args.preparation.max_prompt_length": "2000"}
    init |= {"data.init_args.preparation.max_length": "3000", "data.init_args.batch_size": "4"}
    return [word for key, value in init.items() for word in (f"--{key}", value)]


@pytest.mark.parametrize("name", ["conversation", *overlays("conversation")])
def test_packaged_config_trains(name, tiny, conversation_file, tmp_path, capsys) -> None:
    overlay = [] if name == "conversation" else ["--config", name]
    root = ["--trainer.default_root_dir", str(tmp_path / "run")]
    data = ["--data.init_args.train_file", conversation_file]
    data = [] if name == "conversation/example" else data
    main(["fit", "--config", "conversation", *overlay, *tiny, *data, *root])


@pytest.mark.parametrize("name", COMPARISONS)
def test_packaged_comparison_runs(
    name, tiny, conversation_file, runs_alone, tmp_path, capsys
) -> None:
    place = tiny.index("--trainer.max_epochs")  # A method may train for no epoch at all.
    arguments = tiny[:place] + tiny[place + 2 :]
    arguments += ["--data.init_args.train_file", conversation_file]
    output = tmp_path / "results"
    arguments = ["--config", "conversation", "--methods", f"conversation/{name}", *arguments]
    arguments += ["--trainer.num_sanity_val_steps", "0"]  # `fit` has them.
    main(["compare", *arguments, "--trainer.max_steps", "1", "--output", str(output)])
    with (output / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(yaml.safe_load((FOLDER / "compare" / f"{name}.yaml").read_text()))
    for row in rows:
        assert row["error"] == ""
        assert 0 <= float(row["train/all_met"]) <= 1
        assert float(row["train/avoid/max"]) >= float(row["train/avoid/cvar95"])


def test_every_method_is_trained_and_judged_at_the_same_tolerances(tiny, conversation_file) -> None:
    for method in ("pointwise", "penalty_hinge"):
        names = ["conversation", "conversation/example", f"conversation/{method}"]
        args = [word for name in names for word in ("--config", name)]
        module = PointwiseCLI([*args, *tiny], run=False).model
        for constraints in (module.constraints, module.evaluation_constraints):
            assert constraints["prefer"].at_least == -0.02
            assert constraints["avoid"].at_most == -4
            assert constraints["refuse"].at_least == -0.02
        assert set(module.formulations) == {"prefer", "avoid", "refuse"}
