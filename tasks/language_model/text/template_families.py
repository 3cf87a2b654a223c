"""How chat templates differ, as tables: what a family is known by, what is done, and who has it.

A family is known by what its template writes for a probe, never by a model's name; the models are
those it was seen with. Of each table the first row that fits is taken.

    THOUGHTS_STAND   where a template has the thought of an answer
    CALLS_ARE        what it takes as a tool call
    PROMPTS_END      where the prompt of an answer ends
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import Any

from pl_pointwise.errors import DataError

from .messages import Parts
from .reasoning import Marks, empty_thought, text_with_thought, without_empty_thought
from .records import Record
from .rendering import CallForm, ChatTemplate

HELLO = Record([{"role": "user", "content": "Hello"}], [], (), "probe")
PROBE = Parts("probe of an answer")
_THOUGHT = "probe of a thought"

MARK = r"(?:<[^<>\s]+>|\[[^\[\]\s]+\]|◁[^◁▷\s]+▷)"
"""What looks like a mark of a template, a token or not."""
_LAST_MARK = re.compile(MARK + r"[^<>\[\]◁▷]{0,20}$")
_FIRST_MARK = re.compile(MARK)
_CHANNEL_MARK = "<|channel|>"

# Thoughts -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What the recogniser of a place for thoughts reads.

    Args:
        template: with the marks of the thought that its generation prompt begins.
        base: what it writes for a conversation, up to where the assistant begins.
        closing: what ends an assistant's turn.
        in_source: the marks of thoughts that stand in its source.
    """

    template: ChatTemplate
    base: str
    closing: str
    in_source: Marks

    def texts_with_thoughts(self) -> Iterator[tuple[tuple[str, str], str]]:
        """A text behind a thought, by each of the marks in the source."""
        for marks in self.in_source:
            yield marks, text_with_thought(_THOUGHT, PROBE.text, marks)


@dataclass(frozen=True)
class ThoughtForm:
    """Where a template has the thought of an answer; as it stands here it has none.

    Args:
        splits: whether the thought that begins a text is handed over apart from it.
        written: whether the template has a place for thoughts, and writes them.
        as_text: the marks between which a thought has to stand in the text.
        left_out: the marks between which it takes one out of the text in silence.
        marks: between which it writes one, as far as the probe shows.
        heads: what it writes between a thought and the answer.
    """

    splits: bool = False
    written: bool = False
    as_text: tuple[str, str] | None = None
    left_out: tuple[str, str] | None = None
    marks: Marks = ()
    heads: tuple[str, ...] = ()


@dataclass(frozen=True)
class ThoughtFamily:
    """A row of THOUGHTS_STAND: ``form`` of a probe is None where the family is another."""

    stands: str
    form: Callable[[Asked], ThoughtForm | None]
    seen_with: str


def _in_a_field(asked: Asked) -> ThoughtForm | None:
    written = ""
    # Templates that allow an answer no further fields refuse the probe: theirs is another family.
    with suppress(DataError):
        thinking = replace(PROBE, reasoning=_THOUGHT)
        written = asked.template.render(HELLO, thinking)
    if _THOUGHT not in written:
        return None
    marks = _marks_around(written, asked.base, asked.closing)
    behind = written.partition(_THOUGHT)[2].partition(PROBE.text)[0].strip()
    heads = [behind.removeprefix(end).lstrip() for _, end in marks]
    return ThoughtForm(splits=True, written=True, marks=marks, heads=tuple(heads))


def _behind_the_prompt(asked: Asked) -> ThoughtForm | None:
    open_thought = empty_thought(asked.base, asked.template.thoughts)[1]
    return ThoughtForm(splits=True) if open_thought else None


def _kept_in_the_text(asked: Asked) -> ThoughtForm | None:
    for marks, text in asked.texts_with_thoughts():
        with suppress(DataError):
            whole = asked.template.render(HELLO, Parts(text))
            # Kimi-K2-Thinking writes an empty thought in front of the one in the text.
            behind = without_empty_thought(
                whole.removeprefix(asked.base), asked.template.thoughts
            )
            # Within Command A's response marks it would be no thought, nor behind a closed one.
            closed = asked.base.rstrip().endswith(marks[1])
            if whole.startswith(asked.base) and behind.startswith(text) and not closed:
                return ThoughtForm(as_text=marks)
    return None


def _taken_out_of_the_text(asked: Asked) -> ThoughtForm | None:
    for marks, text in asked.texts_with_thoughts():
        with suppress(DataError):
            # Not the whole text has to be there, as the question is whether it is.
            whole = asked.template.render(HELLO, Parts(text), whole=False)
            if whole.startswith(asked.base + PROBE.text):
                return ThoughtForm(splits=True, left_out=marks)
    return None


THOUGHTS_STAND = (
    ThoughtFamily(
        "in a field of their own, which the template writes",
        _in_a_field,
        "Qwen3, GLM-4.5, gpt-oss, Nemotron 3, MiniMax-M2",
    ),
    ThoughtFamily(
        "behind a generation prompt that begins one; the template takes them out of texts",
        _behind_the_prompt,
        "DeepSeek-V3, DeepSeek-R1's distilled models, QwQ, OLMo-3-Think",
    ),
    ThoughtFamily(
        "at the start of the text, where the template leaves them",
        _kept_in_the_text,
        "SmolLM3, Granite 3.3, Ministral-3-Reasoning, Kimi-K2-Thinking",
    ),
    ThoughtFamily(
        "nowhere: the template takes them out of every answer, and they are put back",
        _taken_out_of_the_text,
        "DeepSeek-R1-0528",
    ),
)
"""Of a template that fits no row a thought is refused: Qwen2.5, Llama 3, Gemma 3."""


def thought_form(asked: Asked) -> ThoughtForm:
    """Where a template has the thought of an answer."""
    for family in THOUGHTS_STAND:
        form = family.form(asked)
        if form is not None:
            return form
    return ThoughtForm()


def _marks_around(written: str, base: str, closing: str) -> list[tuple[str, str]]:
    """What a template wrote before and behind the probe of a thought."""
    before, _, rest = written.partition(_THOUGHT)
    after = rest.partition(PROBE.text)[0].strip()
    last = _LAST_MARK.search(before.rstrip())
    begin = last[0] if last else ""
    # gpt-oss, whose channels reasoning.py knows
    if _CHANNEL_MARK in before or not after:
        return []
    # The last mark may be that of the turn, where a thought begins with plain words.
    if begin in base and not re.search("think|thought|reason", begin, re.IGNORECASE):
        begin = before[len(commonprefix([before, base])) :].strip()  # noqa: RUF071  (of texts)
    first = _FIRST_MARK.match(after)
    # What begins an answer is no part of it, unless the same mark ends a turn as well.
    end = first[0] if first and first[0] not in closing else after
    return [(begin, end)] if begin else []


# Tool calls ---------------------------------------------------------------------------------------

PROBE_VALUE = "probe of an argument"
PROBE_CALL: dict[str, Any] = {
    "name": "probe_of_tool_calls",
    "arguments": {"x": PROBE_VALUE},
}
_SECOND = "second_probe"


@dataclass(frozen=True)
class CallFamily:
    """A row of CALLS_ARE."""

    form: CallForm
    seen_with: str


_PLAIN, _OF_THE_NAME = "call{place:05d}", "functions.{name}:{place}"
CALLS_ARE = (
    # Mistral's takes ids of nine letters and digits alone; most write none.
    CallFamily(CallForm(_PLAIN), "Qwen2.5, GLM-4.5, Llama 3.1, Mistral, gpt-oss"),
    CallFamily(CallForm(_PLAIN, arguments_as_text=True), "DeepSeek-V3"),
    # The id is all of the name that the template writes.
    CallFamily(CallForm(_OF_THE_NAME), "Kimi-K2"),
    CallFamily(CallForm(_OF_THE_NAME, arguments_as_text=True), "none yet"),
)
"""Of a template that fits no row records with calls are refused: Llama 3, Gemma 3."""


def call_form(template: ChatTemplate) -> tuple[CallForm, str]:
    """How a template takes tool calls, and what it writes for the probe of one."""
    why = "it leaves them out"
    for family in CALLS_ARE:
        asked = replace(template, calls=family.form)
        written = ""
        try:
            written = asked.render(HELLO, Parts(calls=[PROBE_CALL]))
        except DataError as error:
            why = str(error)
        if PROBE_VALUE in written and PROBE_CALL["name"] in written:
            return _with_limit(asked), written
    return CallForm(at_most=0, why_none=why), ""


def _with_limit(template: ChatTemplate) -> CallForm:
    """The template's form of calls, with one call a turn where it leaves out a second."""
    both = Parts(calls=[PROBE_CALL, {**PROBE_CALL, "name": _SECOND}])
    # One that refuses two calls says so itself, in words of its own: Llama 3.1's.
    with suppress(DataError):
        if _SECOND not in template.render(HELLO, both):
            return replace(template.calls, at_most=1)
    return template.calls


# Prompts ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptProbe:
    """What a template writes in front of an answer without a thought.

    Args:
        base: the conversation up to where the assistant begins.
        head: what it writes in front of a text, the conversation and a scaffold included.
        front: the head, with the conversation as it is without an answer; "" if it differs.
        thought: the empty thought that the base ends in, and
        closing: what has yet to close it.
        marks: of thoughts.
    """

    base: str
    head: str
    front: str
    thought: str
    closing: str
    marks: Marks

    @property
    def stem(self) -> str:
        """The base without the thought that it ends in."""
        return self.base.removesuffix(self.thought)


@dataclass(frozen=True)
class PromptFamily:
    """A row of PROMPTS_END.

    ``prompt`` is the prompt, and what stands in its place in front of an answer.
    """

    ends: str
    fits: Callable[[PromptProbe], bool]
    prompt: Callable[[PromptProbe], tuple[str, str]]
    seen_with: str


def _with_scaffold(probe: PromptProbe) -> tuple[str, str]:
    # A blank at its end stays in the response: tokenizers join it to the word behind it.
    prompt = probe.base + probe.front[len(probe.base) :].rstrip(" \t")
    place = len(probe.head) - len(probe.front) + len(prompt)
    # Nemotron-Nano-v2 writes an answer right behind the thought that the prompt begins.
    return prompt + empty_thought(prompt, probe.marks)[1], probe.head[:place]


PROMPTS_END = (
    PromptFamily(
        "behind the generation prompt and what stands between it and a text",
        lambda probe: probe.front.startswith(probe.base),
        _with_scaffold,
        "most: Llama 3, Qwen3, GLM-4.5, gpt-oss, Command A, Nemotron-Nano-v2",
    ),
    PromptFamily(
        "behind the empty thought that the generation prompt begins, closed; texts have none",
        lambda probe: probe.front == probe.stem,
        lambda probe: (probe.base + probe.closing, probe.head),
        "DeepSeek-V3 and R1, QwQ, OLMo-3-Think (open); Gemma 4 (closed)",
    ),
    PromptFamily(
        "behind the empty thought that the template writes instead of the one that it begins",
        lambda probe: bool(probe.closing) and probe.front.startswith(probe.stem),
        lambda probe: (probe.front, probe.head),
        "Nemotron 3, GLM-4.7",
    ),
)
"""A template that fits no row does not continue its own generation prompt, and is refused."""
