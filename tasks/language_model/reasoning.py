"""Thoughts that a reasoning model writes before its answer, and the answer behind them.

A model that reasons writes <think>…</think>, or a channel of its own, in front of what it says, and
the chat template writes an empty thought where there is none. What judges an answer, a rule on its
first words, a cost model, a comparison of answers, has to read what stands behind it:
:func:`final_answer`.
"""

from __future__ import annotations

import re

THOUGHTS = (
    ("<think>", "</think>"),  # Qwen3, DeepSeek, GLM, MiniMax, Nemotron, SmolLM3, …
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("◁think▷", "◁/think▷"),  # Kimi
    ("<|channel>thought", "<channel|>"),  # Gemma 4
)
"""What begins and what ends a thought."""

_MESSAGE, _NEXT = "<|message|>", "<|start|>assistant"  # gpt-oss
_ENDS = re.compile(r"<\|(?:end|return|call)\|>\s*$")


def final_answer(text: str) -> str:
    """A generated text without its thoughts: what stands behind the last that ends.

    An answer that begins a thought and never ends it has none: "". So has one of gpt-oss without a
    "final" channel; a tool call there is an answer, and keeps its header, which names the tool. A
    text without such markers is returned as it is.
    """
    if _MESSAGE in text:
        return _of_channels(text)
    place = max((text.rfind(end) + len(end) for _, end in THOUGHTS if end in text), default=0)
    rest = text[place:].lstrip("\n") if place else text
    return "" if rest.lstrip().startswith(tuple(begin for begin, _ in THOUGHTS)) else rest


def split_thought(text: str) -> tuple[str, str]:
    """(thought, answer) of a text that begins with a thought; ("", text) of any other."""
    for begin, end in THOUGHTS:
        thought, found, rest = text.partition(end)
        if found and (not thought.strip() or thought.lstrip().startswith(begin)):
            return thought.lstrip().removeprefix(begin).strip("\n"), rest.lstrip("\n")
    return "", text


def _of_channels(text: str) -> str:
    """Likewise of <|channel|>NAME<|message|>TEXT<|end|><|start|>assistant<|channel|>…"""
    last = text.rpartition(_NEXT)[2] if _NEXT in text else text
    header, _, body = last.partition(_MESSAGE)
    if " to=" in header:
        return last
    return _ENDS.sub("", body) if "final" in header else ""


def empty_thought(text: str) -> tuple[str, str]:
    """(what begins, what ends) the thought that a text stops in, with nothing in it yet.

    The end is written as templates write it behind an empty thought. ("", "") where a text does
    not stop so.
    """
    for begin, end in THOUGHTS:
        _, found, rest = text.rpartition(begin)
        if found and not rest.strip():
            return begin + rest, f"{'' if rest else chr(10)}\n{end}\n\n"
    return "", ""


def in_thought(text: str) -> str:
    """What begins the thought that a text stops in; "" if it stops in none."""
    for begin, end in THOUGHTS:
        if text.rfind(begin) > text.rfind(end):
            return begin
    return ""
