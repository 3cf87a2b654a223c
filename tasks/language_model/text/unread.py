"""Fields that nobody reads: whether they make another record, or say nothing that is missed.

Names that are known to be harmless pass, and so do numbers; any other text, list or object that is
not read is refused with its name, unless what it says stands in the record all the same.
"""

from __future__ import annotations

import re
from typing import Any

from pl_pointwise.tasks.common.harmless import is_harmless, texts_in
from pl_pointwise.tasks.common.records import Row, bad_field, folded, shown

_MODES = re.compile(
    r"^(enable_thinking|thinking_mode|reasoning_effort|reasoning_mode)$|kwargs$"
)
_PARTS = re.compile(
    r"(^|_)(train|trained|training|trainable|loss|weights?|learn|learnt|mask|masked|ignore|ignored"
    r"|skip|skipped|exclude|excluded|detach|masking)(_|$)"
)
_NEGATED = re.compile(
    r"(^|_)(mask|masked|masking|ignore|ignored|skip|skipped|exclude|excluded|detach|not|no|dont"
    r"|without)(_|$)"
)
_TRUE = ("true", "1", "1.0", "yes")
_FALSE = ("false", "0", "0.0", "no", "none")


def check_unread(row: Row, record: Any, where: str) -> None:
    """Refuses what a row says beside what was read of it; the rest counts as read if harmless."""
    record_texts: list[str] | None = None
    for name, value in row.unread().items():
        last = name.rpartition(".")[2]
        plain = last.lower().replace("-", "_")
        ignore = f'or let it pass by data.ignore: ["{last}"]'
        # How the model is to answer, which templates read as arguments.
        if _MODES.search(plain):
            remedy = f"Set policy.template_arguments, {ignore}"
            raise bad_field(where, name, f"is {shown(value)}, and is not read", remedy)
        of_training = bool(_PARTS.search(plain))
        # LLaMA-Factory's, Axolotl's and others' ways to leave a record out of the loss.
        if of_training and _is_asked_off(plain, value):
            problem = (
                f"is {shown(value)}, is not read, and says how to train on the record"
            )
            raise bad_field(where, name, problem, f"Take out the record, {ignore}")
        if of_training or is_harmless(last, value):
            _mark_read(row, name)
            continue
        texts = list(texts_in(value))
        if not texts:
            continue  # Numbers alone: a warning names them.
        record_texts = record_texts if record_texts is not None else _texts_of(record)
        # Rows often have a text twice: raw, and in messages.
        if _stands_in(texts, record_texts) or _holds(texts, row):
            _mark_read(row, name)
            continue
        problem = f"is {shown(value)}, and is not read"
        raise bad_field(
            where, name, problem, f"Write it into the prompt or answer, {ignore}"
        )


def _is_asked_off(name: str, value: Any) -> bool:
    """Whether a field of training asks for less than training on the whole record."""
    word = str(value).lower()
    # mask: 1 leaves out, train: 1 does not.
    if _NEGATED.search(name):
        return word not in _FALSE
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # A weight of its own; a measured loss above 1 is none.
        return value < 1 or ("weight" in name and value != 1)
    return word not in _TRUE


def _mark_read(row: Row, name: str) -> None:
    """So that no warning names the field; ``name`` may be that of an object's, a.b or a[0].b."""
    outer, _, last = name.rpartition(".")
    if not outer:
        row.read.add(last)
        return
    key, _, place = outer.partition("[")
    inner: Any = dict.get(row, key)
    if place and isinstance(inner, list):
        inner = inner[int(place.rstrip("]"))]
    if isinstance(inner, Row):
        inner.read.add(last)


def _texts_of(record: Any) -> list[str]:
    """The texts of a record, without case and spaces."""
    inner = getattr(record, "record", record)
    whole = [
        inner.messages,
        inner.tools,
        [answer for answer in inner.answers if answer],
    ]
    return [folded(text) for text in texts_in(whole)]


def _stands_in(texts: list[str], record_texts: list[str]) -> bool:
    """Whether each text is one of the record, or a longer one stands in one of it."""
    names = {
        *record_texts,
        "system",
        "user",
        "assistant",
        "tool",
        "human",
        "gpt",
        "text",
    }
    enough = 12  # Characters that are not found in another text by chance.
    for text in map(folded, texts):
        within = len(text) >= enough and any(
            text in record_text for record_text in record_texts
        )
        if text and text not in names and not within:
            return False
    return True


def _holds(texts: list[str], row: Row) -> bool:
    """Whether one text has all texts that were read in it, as the column "text" of Alpaca."""
    values = [dict.get(row, name) for name in row.read]
    read = [folded(value) for value in values if value and isinstance(value, str)]
    return (
        len(texts) == 1
        and len(read) > 1
        and all(read_text in folded(texts[0]) for read_text in read)
    )
