"""Of the current folder's Python files none runs that nobody named; those named do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from pl_pointwise.command_line.own_code import (
    NAMED,
    OwnCodeFinder,
    allow_current_folder,
    allow_named,
    installed,
    named_in,
)

OPTIONAL = (
    *(
        "mpi4py",
        "torch_xla",
        "gcsfs",
        "s3fs",
        "adlfs",
        "hqq",
        "wandb",
        "tensorboard",
        "torchao",
    ),
    *(
        "bitsandbytes",
        "kernels",
        "deepspeed",
        "apex",
        "comet_ml",
        "mlflow",
        "neptune",
        "google",
    ),
    *(
        "aim",
        "clearml",
        "flash_attn",
        "xformers",
        "optimum",
        "auto_gptq",
        "awq",
        "eetq",
        "tf_keras",
    ),
    *(
        "tensorflow",
        "flax",
        "jax",
        "keras",
        "habana_frameworks",
        "intel_extension_for_pytorch",
    ),
    *(
        "litserve",
        "torchvision",
        "torchaudio",
        "librosa",
        "cv2",
        "gguf",
        "sklearn2",
        "ruamel_x",
    ),
)


def folder_of_impostors(folder: Path) -> list[Path]:
    """A module under the name of every package that libraries ask for, which says that it ran."""
    for name in OPTIONAL:
        marks = "from pathlib import Path\nPath(__file__ + '.ran').touch()\n"
        text = f"{marks}raise OSError('{name}')\n"
        (folder / f"{name}.py").write_text(text)
    return sorted(folder.glob("*.ran"))


RUN = [
    "--trainer.max_epochs",
    "0",
    "--trainer.logger",
    "false",
    "--trainer.accelerator",
    "cpu",
]
RUN += [
    "--trainer.enable_checkpointing",
    "false",
    "--trainer.enable_progress_bar",
    "false",
]
COMMANDS = {
    "fit": ["fit", "--config", "family", *RUN],
    "test": ["test", "--config", "family", *RUN],
    "compare": ["compare", "--config", "family", "--output", "out", *RUN],
    "tolerances": [
        "tolerances",
        "--config",
        "digits",
        "--output",
        "out",
        "--trainer.accelerator=cpu",
    ],
}


@pytest.mark.parametrize(
    "how", ["console", pytest.param("module", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "command",
    [
        "fit",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("test", "compare", "tolerances")
        ),
    ],
)
def test_nothing_runs_that_nobody_named(command: str, how: str, tmp_path: Path) -> None:
    assert len(OPTIONAL) >= 40
    folder_of_impostors(tmp_path)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    start = [str(Path(sys.executable).with_name("pl-pointwise"))]
    if how == "module":
        start = [sys.executable, "-m", "pl_pointwise"]
    words = [*start, *COMMANDS[command]]
    done = subprocess.run(
        words, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=280
    )
    assert not list(tmp_path.glob("*.ran"))
    assert done.returncode == 0, done.stderr


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    finders, modules = list(sys.meta_path), set(sys.modules)
    yield
    sys.meta_path[:] = finders
    os.environ.pop(NAMED, None)
    for name in {*sys.modules} - modules:
        del sys.modules[name]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "path", [each for each in sys.path if each not in ("", os.getcwd())]
    )
    (tmp_path / "mine_of_test.py").write_text(
        "import helper_of_test\nModel = helper_of_test.Model\n"
    )
    (tmp_path / "helper_of_test.py").write_text("class Model: pass\n")
    (tmp_path / "probed_of_test.py").write_text("raise SystemExit\n")
    return tmp_path


def test_what_is_named_and_what_that_imports_is_found(here: Path) -> None:
    allow_current_folder(
        ["fit", "--model", "mine_of_test.Model", "--data=other_of_test.Data"]
    )
    assert import_module("mine_of_test").Model
    for name in ("probed_of_test", "json_of_test"):
        with pytest.raises(ModuleNotFoundError):
            import_module(name)
    # What a process that is started anew may be handed.
    assert os.environ[NAMED].split(os.pathsep)[1:] == [
        *("helper_of_test", "mine_of_test", "other_of_test")
    ]


def test_a_configuration_names_code_too(here: Path) -> None:
    allow_current_folder(["fit", "--config", "own.yaml"])
    with pytest.raises(ModuleNotFoundError):
        import_module("mine_of_test")
    allow_named(
        {
            "model": {"class_path": "mine_of_test.Model"},
            "trainer": {"callbacks": ["a.B"]},
        }
    )
    assert import_module("mine_of_test").Model


def test_without_leave_a_configuration_names_nothing(here: Path) -> None:
    """As of a stranger's folder."""
    assert installed() is None
    allow_named({"class_path": "mine_of_test.Model"})
    with pytest.raises(ModuleNotFoundError):
        import_module("mine_of_test")


def test_what_is_found_elsewhere_is_taken_from_there(here: Path) -> None:
    (here / "json.py").write_text("raise SystemExit")
    (here / "colorsys.py").write_text("raise SystemExit")
    sys.modules.pop("colorsys", None)
    allow_current_folder(["fit", "--model", "colorsys.Model"])
    assert "lib" in str(import_module("colorsys").__file__)


def test_an_environment_within_the_folder_is_no_own_code(here: Path) -> None:
    library = here / "venv/lib/site-packages"
    library.mkdir(parents=True)
    (library / "library_of_test.py").write_text("import probed_of_test\n")
    sys.meta_path.append(OwnCodeFinder(str(here)))
    sys.path.append(str(library))
    with pytest.raises(ModuleNotFoundError, match="probed_of_test"):
        import_module("library_of_test")


def test_names_are_class_paths_alone(here: Path) -> None:
    (here / "train.jsonl").touch()
    assert (
        named_in(["train.jsonl", "a b.c", "1.5", "x", "./y.z", "http://a.b", 3, None])
        == []
    )
    assert named_in({"a": [{"class_path": " own.sub.Model "}]}) == ["own"]
