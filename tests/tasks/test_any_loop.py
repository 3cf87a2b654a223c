"""The programs of docs/any_loop.md run as they are printed, the language model but a tiny one."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).resolve().parents[2] / "docs/any_loop.md"
PROGRAMS = re.findall(
    r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
)


@pytest.mark.parametrize("name", ["plain", "trl", "refusing", "fabric", "accelerate"])
def test_the_program_runs(
    name: str,
    tmp_path: Path,
    monkeypatch: Any,
    capsys: Any,
    language_model_folder: Path,
) -> None:
    marks = {
        "plain": "randperm",
        "trl": "class BudgetTrainer",
        "refusing": "class RefusingTrainer",
        "fabric": "L.Fabric",
        "accelerate": "from accelerate",
    }
    (code,) = [c for c in PROGRAMS if marks[name] in c]
    if "from trl" in code and importlib.util.find_spec("trl") is None:
        pytest.skip("TRL is not installed")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    monkeypatch.setenv("MODEL", str(language_model_folder))
    end: dict[str, Any] = {"__name__": "program"}
    exec(compile(code, "any_loop.md", "exec"), end)
    constrained = (
        end["constrained"] if "constrained" in end else end["trainer"].constrained
    )
    assert len(constrained.multipliers) == 1
    assert constrained.steps > 0
    if name == "plain":
        assert float(end["error"].max()) < 0.105
        assert "λ > 0 on" in capsys.readouterr().out
    if name == "refusing":
        (refusal,) = constrained.multipliers.values()
        # The first three rows are those to refuse.
        assert (refusal[:3] > 0).all()
        assert not refusal[3:].any()
    if name == "trl":
        assert sorted(tmp_path.glob("budget/checkpoint-*/pointwise.pt"))
