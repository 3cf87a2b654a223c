"""``pl-pointwise export``: a checkpoint becomes a folder, and its class path is not believed."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pl_pointwise.cli import main
from pl_pointwise.tasks import digits

SMALL = [
    "--trainer.enable_progress_bar",
    "false",
    "--trainer.enable_model_summary",
    "false",
]
SMALL += ["--trainer.max_epochs", "1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fit of the packaged example, as the command line leaves it."""
    root = tmp_path_factory.mktemp("digits")
    main(["fit", "--config", "digits", "--trainer.default_root_dir", str(root), *SMALL])
    return root / "lightning_logs/version_0"


def checkpoint_of(run: Path) -> Path:
    (checkpoint,) = run.rglob("*.ckpt")
    return checkpoint


def reclassified(run: Path, name: str, folder: Path) -> Path:
    """The checkpoint, as one that says it is of another class."""
    state = torch.load(checkpoint_of(run), weights_only=True)
    state["hyper_parameters"]["_class_path"] = name
    torch.save(state, folder / "other.ckpt")
    return folder / "other.ckpt"


def refusal(capsys: Any, *args: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["export", *args])
    assert ended.value.code == 2
    found: str = capsys.readouterr().err
    return found


def test_a_run_leaves_log_checkpoint_and_validation_in_one_folder(run: Path) -> None:
    assert (run / "config.yaml").is_file()
    assert "val/kept/violated" in (run / "metrics.csv").read_text().splitlines()[0]
    assert checkpoint_of(run).parent.parent == run
    assert [path.name for path in run.parent.parent.iterdir()] == ["lightning_logs"]


def test_the_commands_that_are_printed_go_from_fit_to_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Each is typed as it stands."""
    monkeypatch.chdir(tmp_path)
    main(["fit", "--config", "digits", *SMALL])
    for command, outcome in (("test", "kept/violated"), ("export", "Exported to")):
        typed = capsys.readouterr().out.rstrip().splitlines()[-1].split()
        assert typed[:2] == ["pl-pointwise", command]
        main(typed[1:])
        if command == "export":
            assert outcome in capsys.readouterr().out
    folder = tmp_path / "lightning_logs/version_0/export"
    weights = torch.load(checkpoint_of(folder.parent), weights_only=True)["state_dict"]
    found = load_file(folder / "model.safetensors")
    torch.testing.assert_close(
        found["0.weight"], weights["network.0.weight"], rtol=0, atol=0
    )
    card = (folder / "README.md").read_text()
    assert f"weights of the checkpoint: {checkpoint_of(folder.parent).name}" in card


def test_a_class_path_in_a_checkpoint_is_not_imported(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "hostile_task.py").write_text("raise SystemError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    other = reclassified(run, "hostile_task.DigitsModule", tmp_path)
    error = refusal(capsys, "--ckpt_path", str(other))
    assert "is of hostile_task.DigitsModule, which pl_pointwise does not ship" in error
    assert "--config CONFIG, the config.yaml that fit wrote" in error
    assert "hostile_task" not in sys.modules
    for name in (
        "pl_pointwise.cli.main",
        "pl_pointwise.cli.os.system",
        "pl_pointwise.none.Such",
    ):
        error = refusal(capsys, "--ckpt_path", str(reclassified(run, name, tmp_path)))
        assert "does not ship" in error


def test_a_class_of_ones_own_is_named_by_the_configuration(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Its file lies in the folder, and is imported when the user's own word names it."""
    shutil.copy(Path(digits.__file__).with_name("digits.py"), tmp_path / "my_digits.py")
    monkeypatch.syspath_prepend(tmp_path)
    other = reclassified(run, "my_digits.DigitsModule", tmp_path)
    text = (
        (run / "config.yaml")
        .read_text()
        .replace("pl_pointwise.tasks.digits.", "my_digits.")
    )
    (tmp_path / "config.yaml").write_text(text)
    error = refusal(capsys, "--ckpt_path", str(other))
    assert f"Name the class: --config {tmp_path / 'config.yaml'}" in error
    assert "my_digits" not in sys.modules
    (tmp_path / "wrong.yaml").write_text("model: {class_path: os.path.join}")
    options = ["--ckpt_path", str(other), "--config", str(tmp_path / "wrong.yaml")]
    assert "the model os.path.join is no PointwiseModule" in refusal(capsys, *options)
    main(
        ["export", "--ckpt_path", str(other), "--config", str(tmp_path / "config.yaml")]
    )
    assert (tmp_path / "export/model.safetensors").is_file()


def test_files_that_no_export_wrote_stay(
    run: Path, tmp_path: Path, capsys: Any
) -> None:
    options = ["--ckpt_path", str(checkpoint_of(run)), "--output", str(tmp_path)]
    (tmp_path / "README.md").write_text("my project\n")
    assert "has files that are not of an earlier export" in refusal(capsys, *options)
    assert (tmp_path / "README.md").read_text() == "my project\n"
    (tmp_path / "README.md").unlink()
    for _ in range(2):  # Its own are replaced.
        main(["export", *options])
    assert (tmp_path / "model.safetensors").is_file()


def test_what_is_no_checkpoint_is_said_in_a_sentence(
    tmp_path: Path, capsys: Any
) -> None:
    path = str(tmp_path / "none.ckpt")
    assert f"not found: {path}" in refusal(capsys, "--ckpt_path", path)
    (tmp_path / "bad.ckpt").write_text(json.dumps({}))
    assert "cannot be read" in refusal(
        capsys, "--ckpt_path", str(tmp_path / "bad.ckpt")
    )
