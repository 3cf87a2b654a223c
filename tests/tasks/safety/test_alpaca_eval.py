"""AlpacaEval: files its package reads."""

from __future__ import annotations

import json

from pl_pointwise.tasks.safety.alpaca_eval import write_outputs


def test_the_file_is_a_list_of_stripped_answers_with_their_model(tmp_path) -> None:
    rows = [
        {"instruction": "Name a colour.", "output": ' Blau – ünï\n"blue"\n'},
        {"instruction": "1 + 1?", "output": ""},
    ]
    path = write_outputs(tmp_path / "a" / "model_outputs.json", rows, "policy")
    assert json.loads(path.read_text(encoding="utf-8")) == [
        {**rows[0], "output": 'Blau – ünï\n"blue"', "generator": "policy"},
        {**rows[1], "generator": "policy"},
    ]
