"""Texts that hold marks of turns are refused: what was rendered once is not to be rendered again.

Such marks are the special tokens of the model's own tokenizer anywhere in a text, those of other
models at its start or end, and at the end of a prompt what other formats end in ("Response:").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.harmless import texts_in
from pl_pointwise.tasks.common.records import shown

from .messages import parts_of
from .reasoning import Marks
from .records import Record
from .rendering import any_of

_READY = re.compile(
    r"(\[/INST\]|<\|assistant\|>|###? ?(Response|Assistant|Output):|\n\s*Assistant:|\sASSISTANT:"
    r"|<[^<>\s]+>(assistant|model)(<[^<>\s]+>)?)\s*$"
)
"""What the prompts of other models' formats end in."""
# Not <|begin_of_thought|> and <|end_of_solution|>, which some data sets have in texts.
_TOKEN = r"<\|(?!\w*(?:think|thought|reason|solution))\w+\|>|<(?:start|end)_of_turn>|<｜[^｜\s]+｜>"
_FOREIGN = re.compile(
    rf"^\s*({_TOKEN}|<bos>|<s>(?!.*</s>))|({_TOKEN}|<eos>|</s>)\s*$", re.DOTALL
)
"""A mark of turns, also of another model, at the start or end of a text."""

_ANSWER = "the answer"


@dataclass(frozen=True)
class TurnMarks:
    """The marks that no text may hold.

    Args:
        of_model: a pattern of the model's; None if it has none.
        ends: what ends an answer, of which the refusal has words of its own.
        thoughts: what begins and ends a thought, which a text may hold.
    """

    of_model: re.Pattern[str] | None
    ends: Sequence[str]
    thoughts: Marks

    @classmethod
    def of(
        cls, prompt: str, added: Iterable[Any], ends: Sequence[str], thoughts: Marks
    ) -> TurnMarks:
        """Of the special tokens, and of the added ones with which a prompt marks turns."""
        names = {ends[0]}
        for token in added:
            # ChatML's <|im_start|> is no special token of every tokenizer that turns begin with it.
            if token.special or token.content in prompt:
                names.add(token.content)
        names -= set(chain.from_iterable(thoughts))
        marks = sorted(name for name in names if name.strip())
        return cls(re.compile(any_of(marks)) if marks else None, ends, thoughts)

    def check(self, record: Record) -> None:
        """Refuses a text in which marks of turns stand: it is rendered already."""
        for turn in record.messages:
            calls = [call["function"] for call in turn.get("tool_calls") or ()]
            whose = f"a turn of role {turn['role']}"
            of_turn = [turn["content"], turn.get("reasoning_content"), calls]
            for text in texts_in(of_turn):
                self._check_text(text, record.where, whose)
        for text in texts_in(record.tools):
            self._check_text(text, record.where, "a tool")
        _check_ready(record)
        for parts in map(parts_of, record.answers):
            for text in texts_in([parts.text, parts.reasoning, parts.calls]):
                self._check_text(text, record.where, _ANSWER)

    def _check_text(self, text: str, where: str, whose: str) -> None:
        if self.of_model is None:
            return
        match = self.of_model.search(text)
        if match is not None:
            if match[0] in self.ends and whose == _ANSWER:
                return  # It has a message of its own, where the answer is cut.
            raise DataError(
                f"{where}: {whose} holds {match[0]}, a mark of the model's tokenizer or chat "
                "template. Give the plain text, or messages."
            )
        mark = self._foreign_mark(text)
        if mark:
            raise DataError(
                f"{where}: {whose} begins or ends with {mark}, a mark of another model's turns. "
                "Give the plain text, or messages."
            )

    def _foreign_mark(self, text: str) -> str:
        """The mark of turns that a text begins or ends with; "" if there is none."""
        foreign = _FOREIGN.search(text)
        mark = (foreign[1] or foreign[2]).strip() if foreign else ""
        # <s>…</s> is a text that HTML strikes out.
        struck = mark == "</s>" and "<s>" in text
        return "" if struck or any(mark in pair for pair in self.thoughts) else mark


def _check_ready(record: Record) -> None:
    """Refuses a prompt that ends where an assistant would begin in another model's format."""
    last = record.messages[-1]
    ready = _READY.search(last["content"]) if last["role"] == "user" else None
    if ready is not None:
        raise DataError(
            f"{record.where}: the prompt ends in {shown(ready[0].strip())}, as one in the form "
            "of a chat template does. Give the plain text, or messages."
        )
