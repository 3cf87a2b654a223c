"""The commands of docs/own_task.md, typed one after the other in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pl_pointwise.cli import main
from tests.test_documented_commands import commands

PAGE = Path(__file__).resolve().parents[1] / "docs/own_task.md"
QUICK = ["--trainer.max_epochs", "1", "--trainer.enable_progress_bar", "false"]
QUICK += [
    "--trainer.enable_model_summary",
    "false",
    "--trainer.limit_train_batches",
    "2",
]


def test_the_page_works_from_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PAGE.read_text()
    first = re.findall(r"(?s)```\n(.*?)```", page)[0]
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    subprocess.run(
        ["bash", "-ec", first], cwd=tmp_path, env=env, check=True, timeout=200
    )
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"digits.py", "digits.yaml", "methods.yaml"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    typed = [shlex.split(line)[1:] for line in dict.fromkeys(commands(page))]
    assert [args[0] for args in typed] == ["fit", "test", "export", "compare"]
    for args in typed:
        found = [str(path) for path in Path("lightning_logs/version_0").rglob("*.ckpt")]
        args = [found[0] if word.endswith(".ckpt") else word for word in args]
        if args[0] == "compare":
            del args[args.index("1") : args.index("2") + 1]  # Of the seeds.
        main([*args, *(QUICK if args[0] in ("fit", "compare") else [])])
    assert Path("lightning_logs/version_0/export/model.safetensors").is_file()
    assert Path("results/comparison.md").is_file()
    assert "failed" not in capsys.readouterr().out
