"""What a comparison runs is known, and checked, before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from pl_pointwise.cli import PointwiseCLI
from pl_pointwise.compare.command import check_methods
from pl_pointwise.compare.runs import Comparison
from tests.pl_pointwise.compare.test_command import write_files

METHODS = """
pointwise: {model: {init_args: {formulation: {class_path: pl_pointwise.Pointwise}}}}
relaxed:
  model:
    init_args: {formulation: {class_path: pl_pointwise.Relaxed, init_args: {beta: 1.0}}}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    return write_files(tmp_path, METHODS)[1]


def swept(config: str, *settings: str, methods: bool = True) -> Comparison:
    folder = Path(config).parent
    file = str(folder / "methods.yaml") if methods else None
    return Comparison([config], folder / "out", file, (0, 1), settings)


def test_a_method_without_training_stays_untrained_whatever_holds_for_all(
    config,
) -> None:
    folder = Path(config).parent
    (folder / "longer.yaml").write_text("trainer: {max_epochs: 9}")
    (folder / "methods.yaml").write_text(
        "as it is: {trainer: {max_epochs: 0}}\n"
        f"trained: {folder}/longer.yaml\n"
        f"both: [{folder}/longer.yaml, {{trainer: {{max_epochs: 0}}}}]\n"
        "trained after all: [{trainer: {max_epochs: 0}}, {trainer: {max_epochs: 3}}]\n"
        "no trainer: {trainer: null}\n"
    )
    methods, longer = str(folder / "methods.yaml"), ["--trainer.max_epochs", "5"]
    runs = Comparison([config], folder / "out", methods, overrides=longer).runs
    for run, epochs in zip(runs[:4], (0, 5, 0, 5), strict=True):
        cli = PointwiseCLI(run.arguments, run=False)
        assert cli.config["trainer"]["max_epochs"] == epochs


def test_settings_give_every_combination_at_every_method_and_seed(config) -> None:
    runs = swept(config, "model.formulation.alpha=1,10", "trainer.max_epochs=3,4").runs
    assert len(runs) == 2 * 2 * 2 * 2
    expected = [
        f"pointwise, alpha={a}, max_epochs={n}" for a in (1, 10) for n in (3, 4)
    ]
    assert [run.method for run in runs[:8:2]] == expected
    assert (
        len({run.digest for run in runs})
        == len({run.folder for run in runs})
        == len(runs)
    )


def test_a_path_may_leave_init_args_out(config) -> None:
    runs = swept(config, "model.formulation.alpha=1e-3,7").runs
    found = []
    for run in runs[::2]:
        model = PointwiseCLI(run.arguments, run=False).model
        found.append(
            (type(model.formulations["fit"]).__name__, model.formulations["fit"].alpha)
        )
    assert found == [
        ("Pointwise", 1e-3),
        ("Pointwise", 7),
        ("Relaxed", 1e-3),
        ("Relaxed", 7),
    ]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("model.tolerance=wide", "wide"),
        # Only the other method has it.
        ("model.formulation.init_args.beta=1", "pointwise, beta=1"),
        ("model.tolerance", "dotted path"),
        ("model.tolerance=1,,2", "a value is missing"),
        ("model.tolerance=1 model.tolerance=2", "given twice"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused_before_any_run(
    config, settings, reason
) -> None:
    comparison = swept(config, *settings.split())
    with pytest.raises(ValueError, match=reason):
        check_methods(comparison)
    assert not comparison.output.exists()


def test_without_methods_the_configuration_is_the_method(config) -> None:
    assert [run.method for run in swept(config, methods=False).runs] == ["base", "base"]


@pytest.mark.parametrize(
    ("methods", "reason"),
    [
        ("a b: null\na/b: null", r"a/b: would share the folder .*with 'a b'"),
        ("..: null\nplain: null", "gives its folder no name"),
        ("'- -': null\nplain: null", "gives its folder no name"),
    ],
)
def test_a_method_without_a_folder_of_its_own_is_refused(
    config, methods, reason
) -> None:
    Path(config).with_name("methods.yaml").write_text(methods)
    with pytest.raises(ValueError, match=reason):
        check_methods(swept(config))
