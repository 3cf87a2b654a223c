"""What a chat template is asked before it renders a record: how it ends turns, thinks, and calls.

Each question is a conversation with a probe for an answer, and what the template writes for it says
the answer. The families that the answers tell apart are tables in template_families.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from pl_pointwise.errors import DataError

from .reasoning import Marks
from .rendering import ChatTemplate, any_of, name_of
from .seam import prompt_and_head
from .template_families import (
    HELLO,
    PROBE,
    PROBE_VALUE,
    Asked,
    ThoughtForm,
    call_form,
    thought_form,
)
from .template_source import marks_in, opened_by
from .turn_marks import TurnMarks


@dataclass(frozen=True)
class Ending:
    """What a template writes behind an answer.

    Args:
        tail: all of it; None where the answer's end is not known from the probe.
        closing: of it what ends the turn, the end token included.
    """

    tail: str | None
    closing: str


@dataclass(frozen=True)
class Traits:
    """A chat template, and what it answered.

    Args:
        template: with its form of calls, and its marks of thoughts first.
        behind_text: what it writes behind a text.
        behind_call: and behind a tool call.
        ends: the end token, and the last token that ends a turn.
        thought_form: where it has the thought of an answer.
        heads: what it writes in front of an answer, as far as one is known.
        turn_marks: what no text may hold.
    """

    template: ChatTemplate
    behind_text: Ending
    behind_call: Ending
    ends: tuple[str, str]
    thought_form: ThoughtForm
    heads: tuple[str, ...]
    turn_marks: TurnMarks

    @property
    def thoughts(self) -> Marks:
        """What begins and what ends a thought, in the order in which they are tried."""
        return self.template.thoughts

    @property
    def closings(self) -> list[str]:
        """What ends a turn behind a text, and behind a call."""
        return [self.behind_text.closing, self.behind_call.closing]


def traits_of(template: ChatTemplate) -> Traits:
    """Asks a template.

    Raises:
        DataError: it does not continue its own generation prompt.
    """
    _check_continues(template)
    added: list[Any] = [*template.tokenizer.added_tokens_decoder.values()]
    end = str(template.tokenizer.eos_token)
    special = any_of([end, *(token.content for token in added if token.special)])
    behind_text = _ending(template, special, end)
    ends = (end, re.findall(special, behind_text.closing)[-1])
    base = template.render(HELLO)
    opened = opened_by(base)
    template = replace(
        template, thoughts=[*dict.fromkeys([*opened, *template.thoughts])]
    )
    in_source = marks_in(template.source)
    form = thought_form(Asked(template, base, behind_text.closing, in_source))
    calls, written = call_form(template)
    template = replace(
        template,
        thoughts=[*dict.fromkeys([*form.marks, *template.thoughts])],
        calls=calls,
    )
    plain = template.render(HELLO, PROBE).rpartition(PROBE.text)[0]
    scaffold = (plain.removeprefix(base),) if plain.startswith(base) else ()
    # A template without a form of calls never ends one.
    behind_call = behind_text
    if written:
        behind_call = _ending_of_call(written, special, ends, behind_text.closing)
    return Traits(
        template=template,
        behind_text=behind_text,
        behind_call=behind_call,
        ends=ends,
        thought_form=form,
        heads=(*scaffold, *form.heads),
        turn_marks=TurnMarks.of(base, added, ends, template.thoughts),
    )


def _check_continues(template: ChatTemplate) -> None:
    try:
        base = template.render(HELLO)
        head = template.render(HELLO, PROBE).rpartition(PROBE.text)[0]
        prompt_and_head(template, HELLO, base, head)
    except DataError as error:
        raise DataError(
            f"The chat template of {name_of(template.tokenizer)} does not continue its own "
            f"generation prompt with an answer.{template.hint} Take another in chat_template. "
            f"({error})"
        ) from error


def _ending(template: ChatTemplate, special: str, end: str) -> Ending:
    """The ending of a text: the token behind it closes its turn, or those up to the end token."""
    tail = template.render(HELLO, PROBE).rpartition(PROBE.text)[2]
    last = re.escape(end)
    # Kimi-K3 closes two elements; where its end token is another, up to the last of the marks.
    without = rf"(?:{special})(?:\S*(?:{special}))?" if end not in tail else special
    near = re.match(rf"\s*({last}|(?:{special})\S*?{last}|{without})", tail)
    # GLM writes none behind the last turn: generation stops at the end token all the same.
    return Ending(tail, near[0]) if near else Ending(None, end)


def _ending_of_call(
    written: str, special: str, ends: tuple[str, str], closing: str
) -> Ending:
    """The ending of a call: the first token behind it that ends texts, else the last of any.

    written: the conversation with the probe of a call.
    """
    tail = written.rpartition(PROBE_VALUE)[2]
    marks = re.findall(special, tail)
    if not marks:
        return Ending(None, closing)
    # gpt-oss ends a call with <|call|>, and a text with <|return|>.
    end = next((end for end in ends if end in marks), marks[-1])
    return Ending(tail[tail.index(end) :], end)
