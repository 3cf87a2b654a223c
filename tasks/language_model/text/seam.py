"""Where the prompt of an answer ends, and what of the whole conversation stands behind it.

What the template writes in front of every answer (a *scaffold*: an empty thought as
``<think></think>``, a channel's name) belongs to the prompt. With tools the prompt is what a text
and a call share, so that the choice between them stays in the response.
"""

from __future__ import annotations

import re
from itertools import chain
from os.path import commonprefix

from .messages import Parts
from .reasoning import closed_thought, empty_thought
from .records import Record
from .rendering import ChatTemplate, any_of
from .template_families import PROMPTS_END, PromptProbe


def prompt_and_head(
    template: ChatTemplate, record: Record, base: str, head: str
) -> tuple[str, str]:
    """(prompt, what stands in its place in front of an answer).

    Args:
        base: the conversation up to where the assistant begins.
        head: what the template writes in front of a text, the scaffold included.

    Raises:
        DataError: with an answer the template writes the conversation in another way.
    """
    thought, closing = empty_thought(base, template.thoughts)
    probe = PromptProbe(base, head, head, thought, closing, template.thoughts)
    last = record.messages[-1]["content"].strip()
    # Mistral's: a system turn is in the last user's, which with an answer is no longer the last.
    # What the template writes behind that turn is then compared alone.
    if last and not head.startswith(probe.stem):
        before, in_base, _ = base.rpartition(last)
        _, in_head, behind = head.rpartition(last)
        front = before + last + behind if in_base and in_head else ""
        probe = PromptProbe(base, head, front, thought, closing, template.thoughts)
    for family in PROMPTS_END:
        if family.fits(probe):
            return family.prompt(probe)
    raise template.differs(record.where)


def before_calls(template: ChatTemplate, head: str, called: str, base: str) -> str:
    """What a text's ``head`` shares with a call, tokens kept whole.

    called: the conversation with a call.
    """
    place = len(commonprefix([head, called]))  # noqa: RUF071  (of texts, not of paths)
    marks = list(chain.from_iterable(template.thoughts))
    # <|channel|> and <|call|> begin alike: half a token is none.
    for token in re.finditer(f"{template.tokens}|{any_of(marks)}", head):
        if token.start() < place < token.end():
            place = token.start()
            break
    # DeepSeek's calls do not go on from a tool's result.
    stem = base.removesuffix(empty_thought(base, template.thoughts)[0])
    return head[:place] if place >= len(commonprefix([head, stem])) else head  # noqa: RUF071


def behind_prompt(
    template: ChatTemplate,
    prompt: str,
    fronts: tuple[str, str],
    whole: str,
    parts: Parts,
    where: str,
) -> str:
    """What the whole has behind the prompt, a thought that it leaves out put back.

    Args:
        fronts: what else may stand in the prompt's place: the head of texts, and the base.
        whole: the conversation with the answer.
        parts: of the answer.
    """
    head, base = fronts
    thought, closing = empty_thought(prompt, template.thoughts)
    base_is_open = empty_thought(base, template.thoughts)[1]
    # Nemotron-Nano-v2 writes answers right behind the thought that the base begins, where the
    # prompt has it closed.
    in_front = (prompt, base, head) if base_is_open else (prompt, head)
    for front in in_front:
        if whole.startswith(front):
            rest = whole[len(front) :]
            return _thought_put_back(template, rest, parts, closing)
    stem = prompt.removesuffix(thought)
    if not (closing and whole.startswith(stem)):
        raise template.differs(where)
    # An answer of this record thinks, and the template writes the others without a thought.
    rest = whole[len(stem) :].removeprefix(thought.rstrip())
    has_thought = len(stem) + len(rest) < len(whole)
    if has_thought or rest.startswith(closing.strip()):
        return rest.lstrip("\n")
    return closed_thought(parts.reasoning, closing) + rest


def _thought_put_back(
    template: ChatTemplate, rest: str, parts: Parts, closing: str
) -> str:
    """What stands behind a prompt, with the answer's thought if the template left it out.

    closing: what has yet to close the thought in which the prompt ends; "" if it ends in none.
    """
    ends = [end for _, end in template.thoughts]
    if parts.reasoning:
        written = parts.reasoning.strip() in rest
    else:
        written = any(end in rest for end in ends)
    if not closing or written:
        return rest
    if rest.lstrip().startswith(tuple(ends)):
        # Kimi-K2.5 closes a thought that it leaves out.
        return parts.reasoning + rest
    return closed_thought(parts.reasoning, closing) + rest.lstrip("\n")
