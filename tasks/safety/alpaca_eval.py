"""AlpacaEval: answers in the form its package reads.

One file holds one model's answers, a JSON list in the order of the instructions:

    [{"instruction": …, "output": …, "generator": name of the model}, …]

Any release of ``alpaca_eval`` judges such files:
``alpaca_eval --model_outputs … --reference_outputs …``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from pl_pointwise.tasks.language_model.reasoning import final_answer


def write_outputs(path: str | Path, rows: Iterable[Mapping[str, str]], generator: str) -> Path:
    """Write one model's answers as ``model_outputs.json``; folders are made.

    White space around an answer is left out, as the package does with answers it generates, and so
    are the thoughts of a model that reasons.

    Args:
        path: the file.
        rows: {"instruction", "output"} of each answer, in the order of the instructions.
        generator: name of the model; policy and reference need two.
    """
    path = Path(path)
    listed = [
        {
            "instruction": row["instruction"],
            "output": final_answer(row["output"]).strip(),
            "generator": generator,
        }
        for row in rows
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(listed, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return path
