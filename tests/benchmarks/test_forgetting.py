"""The study of forgetting: it teaches, tunes, chooses, and goes on where it stopped."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from benchmarks import forgetting
from tests.tasks.conftest import build_model, build_tokenizer, write_rows


def test_a_study_tunes_chooses_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = tmp_path / "models/tiny", build_tokenizer()
    build_model("llama", vocab_size=len(tokenizer)).save_pretrained(model)
    tokenizer.save_pretrained(model)
    (tmp_path / "tofu").mkdir()
    for role in ("forget", "keep"):
        rows = [{"prompt": f"{role} {i}?", "answer": f"It is {i}."} for i in range(4)]
        write_rows(tmp_path / f"tofu/{role}.jsonl", rows)
    lora = forgetting.CONFIG["model"]["init_args"]["policy"]["lora"]
    monkeypatch.setitem(lora, "target_modules", "all-linear")
    monkeypatch.setattr(forgetting, "MODEL", model.name)
    monkeypatch.setattr(forgetting, "SIZES", {"forget": 2, "keep": 3})
    monkeypatch.setattr(forgetting, "EPOCHS", {"teach": 60, "forget": 1})
    tuned = {name: forgetting.TUNED[name] for name in ("gradient difference",)}
    monkeypatch.setattr(forgetting, "TUNED", tuned)
    folders = {"models": model.parent, "data": tmp_path}
    folders |= {"output": tmp_path / "runs", "csv": tmp_path / "runs.csv"}
    words = [word for name, path in folders.items() for word in (f"--{name}", str(path))]
    forgetting.main([*words, "--seeds"])
    before = (tmp_path / "runs.csv").read_text()
    forgetting.main([*words, "--seeds", "0"])
    assert (tmp_path / "runs.csv").read_text().startswith(before)
    rows = pd.read_csv(tmp_path / "runs.csv").set_index(["seed", "method"])
    assert len(rows.loc[forgetting.TUNING_SEED]) == 6
    assert list(rows.loc[0].index[:3]) == list(forgetting.UNTUNED)
    assert len(rows.loc[0]) == 4
    before_it = rows.loc[(0, "as it is")]
    assert before_it["KL, kept"] == pytest.approx(0, abs=1e-5)
    assert before_it["too little"] == 1
