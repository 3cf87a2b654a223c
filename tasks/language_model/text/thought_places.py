"""The thought of an answer, put where the template reads it, and looked for where it is written.

Records have a thought in a field of its own, or at the start of the text. Where a template wants it
is what it was asked (Traits.thought_form).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.records import shown

from .messages import Parts
from .reasoning import (
    empty_thought,
    split_thought,
    text_with_thought,
    without_empty_thought,
)
from .records import Record
from .template_traits import Traits


def with_thought_in_place(
    traits: Traits, record: Record, parts: Parts, base: str
) -> tuple[Parts, bool]:
    """An answer with its thought where the template reads it; whether it has one.

    base: the conversation up to where the assistant begins.
    """
    form = traits.thought_form
    if parts.reasoning:
        if form.as_text is not None:
            # Kimi-K2-Thinking has a place for it in some turns, so it is tried first.
            behind = traits.template.render(record, parts)[len(base) :]
            if parts.reasoning.strip() not in behind:
                parts = _as_one_text(parts, form.as_text)
        return parts, True
    if not (form.splits or traits.template.reads_thoughts):
        return parts, False
    # It may stand in the text.
    thought, text = split_thought(parts.text, traits.thoughts)
    split = Parts(text, parts.calls, thought)
    if form.splits:
        return split, bool(thought)
    # Of other models, or its beginning is missing: the template's own marks around it.
    if thought and form.as_text and not parts.text.startswith(form.as_text[0]):
        return _as_one_text(split, form.as_text), True
    return parts, bool(thought)


def whole_as_given(traits: Traits, record: Record, prompt: str, original: Parts) -> str:
    """What the template writes for an answer whose text begins with the thought that the prompt
    begins, if that goes on from the prompt word for word (OLMo-3's); else "".
    """
    begin = empty_thought(prompt, traits.thoughts)[0].strip()
    text = original.text.lstrip()
    if not begin or not text.startswith(begin):
        return ""
    # Where it refuses the text, the thought stays in the place that the family has for it.
    with suppress(DataError):
        whole = traits.template.render(record, original)
        behind = text.removeprefix(begin).lstrip()
        goes_on = whole[len(prompt) :].lstrip().startswith(behind)
        if whole.startswith(prompt) and goes_on:
            return whole
    return ""


def with_thought_put_back(traits: Traits, parts: Parts, text: str) -> str:
    """What stands behind a prompt, with the thought that the template took out of it.

    text: what the template wrote there for the answer.
    """
    if split_thought(parts.text, traits.thoughts)[0]:
        # Behind the empty thought that Kimi-K2-Thinking puts in front stands the one in the text.
        text = without_empty_thought(text, traits.thoughts)
    left_out = traits.thought_form.left_out
    if parts.reasoning and left_out and parts.reasoning not in text:
        return text_with_thought(parts.reasoning, text, left_out)
    return text


def check_closed(
    traits: Traits,
    prompt: str,
    answers: Sequence[Parts],
    responses: Sequence[str],
    where: str,
) -> None:
    """Behind a prompt that begins a thought every response has to end one."""
    if not empty_thought(prompt, traits.thoughts)[1]:
        return
    for parts, text in zip(answers, responses, strict=True):
        if not any(end in text for _, end in traits.thoughts):
            raise DataError(
                f"{where}: the prompt ends within a thought, and the answer "
                f"{shown(parts.text)} would be part of it. Give it a thought too, or a record "
                f"of its own.{traits.template.hint}"
            )


def check_marks_of_thoughts(
    traits: Traits, parts: Parts, text: str, where: str, *, thinks: bool
) -> None:
    """Refuses a mark of a thought that the template put into an answer, or read in its text.

    thinks: whether an answer of the record has a thought; then each may have an empty one.
    """
    if parts.calls:  # Command A writes an empty thought in front of them.
        return
    of_answer = parts.text + parts.reasoning
    # Not a set, whose order another process would change, and so which mark is named.
    for mark in dict.fromkeys(chain.from_iterable(traits.thoughts)):
        changed = mark in parts.text and parts.text.strip() not in text
        may_be_empty = thinks and not split_thought(parts.text, traits.thoughts)[0]
        if changed or text.count(mark) > of_answer.count(mark) + may_be_empty:
            raise DataError(
                f"{where}: the chat template takes {mark} in the text of the answer for a mark "
                "of a thought, or adds one. Take it out of the text, or take another template "
                f"in chat_template.{traits.template.hint}"
            )


def _as_one_text(parts: Parts, marks: tuple[str, str]) -> Parts:
    """An answer with its thought in the text, as a template without a place for one has it."""
    text = text_with_thought(parts.reasoning, parts.text, marks)
    return replace(parts, text=text, reasoning="")
