"""AlpacaEval: answers in the form its package reads, and the win rate it gives.

One file holds one model's answers, a JSON list in the order of the instructions:

    [{"dataset": …, "instruction": …, "output": …, "generator": name of the model}, …]

(``dataset`` where the instructions came with it). Any release of ``alpaca_eval`` judges such files,
here or on another machine. :func:`win_rate` calls it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.records import bad_field, decode, field, kind
from pl_pointwise.tasks.language_model.reasoning import final_answer

JUDGE = "weighted_alpaca_eval_gpt4_turbo"
"""The judge of AlpacaEval 2."""


def write_outputs(path: str | Path, rows: Iterable[Mapping[str, str]], generator: str) -> Path:
    """Write one model's answers as ``model_outputs.json``; folders are made.

    White space around an answer is left out, as the package does with answers it generates, and so
    are the thoughts of a model that reasons.

    Args:
        path: the file.
        rows: {"instruction", "output"} of each answer, in the order of the instructions, and
            "dataset" where it is known.
        generator: name of the model; policy and reference need two.

    Raises:
        DataError: no answers, or no name.
    """
    path, listed = Path(path), []
    for row in rows:
        known = {"dataset": row["dataset"]} if "dataset" in row else {}
        texts = {"instruction": row["instruction"], "output": final_answer(row["output"]).strip()}
        listed.append({**known, **texts, "generator": generator})
    if not listed or not generator:
        missing = "no name of the model" if listed else "no answers"
        raise DataError(f"{path}: {missing} to write. Give at least one answer and a name.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(listed, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return path


def win_rate(
    policy: str | Path,
    reference: str | Path,
    *,
    annotator: str = JUDGE,
    length_controlled: bool = True,
    output: str | Path | None = None,
) -> dict[str, float]:
    """How often a judge prefers the policy's answer to the reference's, in percent.

    The judge is a model behind a network interface, which costs money: the default one is OpenAI's
    and needs OPENAI_API_KEY. Needs the extra ``alpaca-eval``.

    Args:
        policy: file of :func:`write_outputs`.
        reference: likewise, with the same instructions in the same order.
        annotator: the judge: a name that alpaca_eval knows, or a folder with its configuration.
        length_controlled: correct for the length of the answers, as the paper reports it. The
            correction knows AlpacaEval's own instructions by their position, so it is for the whole
            set in its own order; it is downloaded from the hub.
        output: folder for the judgements; None is the policy's.

    Returns:
        ``win_rate`` and its ``standard_error``, ``n_total``, ``avg_length`` and what else the
        package reports; with length_controlled ``length_controlled_winrate`` too.

    Raises:
        ImportError: alpaca_eval is not installed.
        DataError: files that are not what they should be, or do not belong together.
    """
    try:
        from alpaca_eval import evaluate
    except ImportError as error:
        raise ImportError(
            "The win rate needs alpaca_eval: pip install 'pl-pointwise[alpaca-eval]'. The files "
            "can also be judged elsewhere: alpaca_eval --model_outputs … --reference_outputs …"
        ) from error
    (rows, name), (other_rows, other_name) = _read(policy), _read(reference)
    if name == other_name:
        raise DataError(
            f'{policy} and {reference} are both by "{name}": a model does not win against itself. '
            "Write them with two generator names."
        )
    _require_same_instructions(rows, other_rows, policy, reference)
    table, _ = evaluate(
        model_outputs=rows,
        reference_outputs=other_rows,
        annotators_config=annotator,
        name=name,
        output_path=Path(policy).parent if output is None else Path(output),
        precomputed_leaderboard=None,  # only these two, and no other's results changed
        is_cache_leaderboard=False,
        is_return_instead_of_print=True,
        fn_metric="get_length_controlled_winrate" if length_controlled else "get_winrate",
        # or it would write into the installed package
        metric_kwargs={"save_weights_dir": None} if length_controlled else None,
        sort_by="length_controlled_winrate" if length_controlled else "win_rate",
    )
    found = table.loc[name].to_dict()
    return {key: float(value) for key, value in found.items() if not isinstance(value, str)}


def _require_same_instructions(
    rows: list[dict[str, Any]], others: list[dict[str, Any]], policy: str | Path, other: str | Path
) -> None:
    """
    Raises:
        DataError: the two files answer other instructions, or in another order.
    """
    asked, asked_other = ([row["instruction"] for row in each] for each in (rows, others))
    if asked == asked_other:
        return
    pairs = enumerate(zip(asked, asked_other, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(asked), len(asked_other)))
    raise DataError(
        f"{policy} and {other} do not answer the same instructions in the same order: they differ "
        f"from number {first + 1} on ({len(asked):,} and {len(asked_other):,} answers). Generate "
        "both from one file."
    )


def _read(path: str | Path) -> tuple[list[dict[str, Any]], str]:
    """The rows of a file and the one model they are by."""
    where = str(path)
    if not Path(path).is_file():
        raise DataError(f"{where}: no such file. Write it with write_outputs.")
    rows = decode(Path(path).read_bytes(), where)
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        problem = f"is {kind(rows)}, not a list of answers"
        raise DataError(f"{where}: {problem}. Write it with write_outputs.")
    for number, row in enumerate(rows, start=1):
        for key in ("instruction", "output", "generator"):
            if not isinstance(field(row, key, f"{where}, answer {number}"), str):
                problem = f"is {kind(row[key])}"
                raise bad_field(f"{where}, answer {number}", key, problem, "Give a text")
    names = sorted({row["generator"] for row in rows})
    if len(names) > 1:
        raise DataError(
            f"{where}: answers of {len(names)} models ({', '.join(names[:3])}). Give each model a "
            "file of its own."
        )
    return rows, names[0]
