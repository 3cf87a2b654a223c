"""``pl-pointwise lost OLD NEW``: what a new model lost, as records to train on.

OLD and NEW are two models' results on the same items, as an evaluation harness wrote them. An item
that OLD has right and NEW has not is *lost*. Lost items become records to learn, those that both
have right become records to keep: training from them repairs what the comparison found.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any

from ..command_line.cli_errors import CommandParser
from ..errors import DataError
from ..files import write_whole

OUTCOMES = ("correct", "passed", "pass", "is_correct", "success", "outcome", "score")
"""Fields that say whether an item is right, in the order in which they are looked for."""
RIGHT = {"c", "correct", "pass", "passed", "true", "yes", "success", "1", "1.0"}
WRONG = {
    "i",
    "incorrect",
    "fail",
    "failed",
    "false",
    "no",
    "wrong",
    "error",
    "0",
    "0.0",
    "n",
}
PARTLY = {"p", "partial"}  # Inspect's partly right: not right.


@dataclass(frozen=True)
class Item:
    """One item of an evaluation."""

    key: str
    prompt: Any  #: a text or a list of messages; None where the file has none
    answer: str | None  #: what the model wrote
    target: str | None  #: what it should have written
    right: bool


def main(args: Sequence[str]) -> None:
    """Runs the command; ends with status 1 if more is lost than ``--allow``."""
    parser = CommandParser(
        "lost", "What NEW has wrong and OLD has right, as records to train on."
    )
    parser.add_argument(
        "old", metavar="OLD", type=Path, help="results: .jsonl or .json"
    )
    parser.add_argument(
        "new", metavar="NEW", type=Path, help="the same items, another model"
    )
    parser.add_argument(
        "--metric", help="the field or scorer that says whether an item is right"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("results/lost"), help="default: %(default)s"
    )
    parser.add_argument(
        "--allow", type=int, help="how many items may be lost; the status is 1 above it"
    )
    parser.add_argument(
        "--answers",
        choices=("old", "target"),
        default="old",
        help="what is to be learnt again: what OLD wrote, or the target; default: %(default)s",
    )
    options = parser.parse_args(list(args))
    old, new = (
        read_items(options.old, options.metric),
        read_items(options.new, options.metric),
    )
    lost, kept, text = compared(old, new, options.old, options.new)
    print(text)
    if lost:
        _write_repair(old, new, lost, kept, options)
    if options.allow is not None and len(lost) > options.allow:
        raise SystemExit(1)


def _write_repair(
    old: Mapping[str, Item],
    new: Mapping[str, Item],
    lost: Sequence[str],
    kept: Sequence[str],
    options: argparse.Namespace,
) -> None:
    """Writes what is to be learnt again and what is to be kept, and says how to train on it."""
    learn, keep = options.output / "learn.jsonl", options.output / "keep.jsonl"
    write_records(learn, [_record(old[key], options.old, options) for key in lost])
    answers = "the answers of OLD" if options.answers == "old" else "their targets"
    written = f"{learn.name}, the lost items with {answers}"
    command = (
        "  pl-pointwise fit --config keep --model.init_args.policy.model_name NEW_MODEL \\\n"
        f"    --data.init_args.source files --data.init_args.learn_file {learn}"
    )
    if kept:
        write_records(keep, [_record(new[key], options.new, options) for key in kept])
        written += f", and {keep.name}, what both have right"
        command += f" \\\n    --data.init_args.keep_file {keep}"
    else:
        # One of an earlier comparison would be taken for this one's.
        keep.unlink(missing_ok=True)
        written += (
            ". No item is right with both, so there is nothing to keep: add a file of prompts "
            "whose answers have to stay as data.init_args.keep_file"
        )
    print(
        f"Written to {options.output}: {written}. Repair, from the new model:\n\n{command}"
    )


def compared(
    old: Mapping[str, Item], new: Mapping[str, Item], first: Path, second: Path
) -> tuple[list[str], list[str], str]:
    """Keys that were lost, keys that both have right, and a text that says so."""
    missing = [key for key in old if key not in new]
    if missing:
        raise DataError(
            f"{second} lacks {len(missing)} of the {len(old)} items of {first}, such as "
            f"{missing[0]!r}: evaluate both models on the same items."
        )
    counts = Counter((old[key].right, new[key].right) for key in old)
    lost = [key for key in old if old[key].right and not new[key].right]
    kept = [key for key in old if old[key].right and new[key].right]
    text = (
        f"{len(old)} items: {counts[True, True]} right with both models, {len(lost)} lost, "
        f"{counts[False, True]} gained, {counts[False, False]} wrong with both."
    )
    changed = len(lost) + counts[False, True]
    if changed:
        text += (
            f" By chance alone, {len(lost)} or more of {changed} changes would be losses with "
            f"probability {_at_least(len(lost), changed):.3g} (McNemar's exact test)."
        )
    return lost, kept, text


def _at_least(successes: int, trials: int) -> float:
    """P(X ≥ successes) of a fair coin: McNemar's exact test, one-sided."""
    return sum(comb(trials, k) for k in range(successes, trials + 1)) / 2**trials


def read_items(path: Path, metric: str | None = None) -> dict[str, Item]:
    """The items of a file, by key; of one that was sampled several times, right if always right.

    Read are lm-evaluation-harness's ``samples_*.jsonl``, Inspect's log as ``.json``, and any JSON
    lines with ``id``, a prompt, an answer and an outcome.

    Raises:
        DataError: names the file, the line and the field.
    """
    items = dict[str, Item]()
    for place, row in _rows(path):
        item = _item(row, metric, f"{path}, {place}")
        before = items.get(item.key)
        if before is not None and before.prompt != item.prompt:
            raise DataError(
                f"{path}, {place}: the id {item.key!r} is that of another prompt before. Ids tell "
                "the items of two files: give one file per task."
            )
        # Once wrong it stays wrong, however often it was sampled.
        if before is None or before.right:
            items[item.key] = item
    if not items:
        raise DataError(f"{path} has no items.")
    return items


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is no text. Of Inspect's .eval give the .json: inspect log convert --to json."
        ) from error
    if path.suffix == ".json":
        rows = _parsed(text, f"{path}")
        # A whole log of Inspect has its items under "samples".
        rows = rows.get("samples", rows) if isinstance(rows, dict) else rows
        if not isinstance(rows, list):
            raise DataError(f'{path} has neither a list of items nor "samples".')
        places = [f"item {number}" for number in range(len(rows))]
    else:
        lines = [
            (n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()
        ]
        rows = [_parsed(line, f"{path}, line {number}") for number, line in lines]
        places = [f"line {number}" for number, _ in lines]
    for place, row in zip(places, rows, strict=True):
        if not isinstance(row, Mapping):
            raise DataError(
                f"{path}, {place}: an item is a JSON object, not {type(row).__name__}."
            )
        yield place, row


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{place} is no JSON: {error.msg} at character {error.pos}."
        ) from error


def _item(row: Mapping[str, Any], metric: str | None, place: str) -> Item:
    for field in ("id", "doc_id", "sample_id", "task_id"):
        if row.get(field) is not None:
            key = str(row[field])
            break
    else:
        raise DataError(
            f'{place}: there is no "id" (or "doc_id"), which tells the items apart.'
        )
    prompt = _first(row, ("prompt", "input", "messages", "question"))
    answer = _first(row, ("answer", "completion", "response", "prediction"))
    if "arguments" in row:  # lm-evaluation-harness
        prompt, answer = _harness_prompt(row["arguments"], place), _harness_answer(row)
    elif isinstance(row.get("output"), Mapping):  # Inspect
        answer = _inspect_answer(row["output"])
    # Inspect's "output" is an object; in any other file it may be the answer's text.
    elif answer is None:
        answer = row.get("output")
    return Item(
        key,
        prompt,
        answer if isinstance(answer, str) else None,
        _text(_first(row, ("target", "expected", "reference"))),
        _outcome(row, metric, place),
    )


def _first(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _text(value: Any) -> str | None:
    # Several answers are right: the first stands for them.
    if isinstance(value, list) and value:
        value = value[0]
    return value if isinstance(value, str) else None


def _harness_prompt(arguments: Any, place: str) -> Any:
    """The text that was given to the model; choices of one question have the same one."""
    if isinstance(arguments, Mapping):  # {"gen_args_0": {"arg_0": …, "arg_1": …}}
        arguments = list(arguments.values())
    first = arguments[0] if isinstance(arguments, list) and arguments else None
    prompt = next(iter(first.values()), None) if isinstance(first, Mapping) else None
    if isinstance(first, list) and first:
        prompt = first[0]
    if not isinstance(prompt, str):
        raise DataError(f'{place}: "arguments" has no text of a prompt.')
    return prompt


def _harness_answer(row: Mapping[str, Any]) -> str | None:
    """What was generated; of a multiple choice question there is no text."""
    responses = row.get("resps")
    while isinstance(responses, list) and len(responses) == 1:
        responses = responses[0]
    return responses if isinstance(responses, str) else None


def _inspect_answer(output: Mapping[str, Any]) -> str | None:
    choices = output.get("choices") or [{}]
    content = (choices[0].get("message") or {}).get("content")
    if isinstance(content, list):
        content = "".join(
            part.get("text", "") for part in content if isinstance(part, Mapping)
        )
    return content or output.get("completion")


def _outcome(row: Mapping[str, Any], metric: str | None, place: str) -> bool:
    scores = row.get("scores")
    if isinstance(scores, Mapping) and scores:  # Inspect: {scorer: {"value": "C"}}
        # Inspect names its scorers, of which there may be several for an item.
        values = {
            name: score.get("value") if isinstance(score, Mapping) else score
            for name, score in scores.items()
        }
    else:
        named = row.get("metrics")  # lm-evaluation-harness names its metrics.
        fields = named if isinstance(named, list) and named else OUTCOMES
        values = {name: row[name] for name in fields if name in row}
        # A metric that is asked for need not be among the usual names.
        if metric is not None and metric in row:
            values = {metric: row[metric]}
    if metric is not None:
        if metric not in values:
            raise DataError(
                f"{place}: there is no {metric!r}, only {', '.join(values) or 'none'}."
            )
        values = {metric: values[metric]}
    if not values:
        raise DataError(
            f'{place}: nothing says whether the item is right: give "correct": true or false, or '
            "--metric NAME."
        )
    verdicts = {name: _right(value) for name, value in values.items()}
    clear = {name: verdict for name, verdict in verdicts.items() if verdict is not None}
    if not clear:
        name, value = next(iter(values.items()))
        raise DataError(
            f"{place}: {name} is {value!r}, which is neither right nor wrong: give true or false."
        )
    if len(set(clear.values())) > 1:
        raise DataError(
            f"{place}: {', '.join(clear)} disagree on whether the item is right: choose one by "
            "--metric."
        )
    return next(iter(clear.values()))


def _right(value: Any) -> bool | None:
    # In front of numbers, as a bool is one to Python.
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return value == 1 if value in (0, 1) else None
    text = str(value).strip().lower()
    if text in RIGHT:
        return True
    return False if text in WRONG | PARTLY else None


def _record(item: Item, path: Path, options: argparse.Namespace) -> dict[str, Any]:
    answer = item.target if options.answers == "target" else item.answer
    if item.prompt is None or answer is None:
        lacks = "a prompt" if item.prompt is None else "a text as answer"
        raise DataError(
            f"{path}: the item {item.key!r} lacks {lacks}, so that nothing can be trained "
            f"on it{'' if options.answers == 'target' else ': try --answers target'}."
        )
    name = "messages" if isinstance(item.prompt, list) else "prompt"
    prompt = item.prompt
    # Other fields of a harness's messages are not the model's.
    if isinstance(prompt, list):
        prompt = [{"role": turn["role"], "content": turn["content"]} for turn in prompt]
        return {name: [*prompt, {"role": "assistant", "content": answer}]}
    return {name: prompt, "answer": answer}


def write_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """As JSON lines."""
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    write_whole(path, "".join(lines))
