"""From a conversation and an answer to the token ids of a prompt and a response.

Everything is rendered by the tokenizer's own chat template:

    prompt     messages, the tools with them, up to where the answer begins
    response   what the template writes for the answer, up to and with the token that ends the turn

so that the prompt's tokens are a prefix of the whole's, the response is what the model itself would
have to generate, and a token that begins a sequence stands where the template puts it, once.

What a template writes in front of every answer (its *scaffold*: an empty thought as
``<think></think>``, a channel's name) belongs to the prompt: it is found on two answers that have
nothing in common. Where a generation prompt begins a thought and the template leaves thoughts out
of what was said, as DeepSeek's, the scaffold ends it. With tools the scaffold is what answers and
tool calls have in common, so that the choice between them stays in the response. The prompt of an
answer with a thought of its own ends where the assistant begins.

Answers are those of messages.py. A template without a form for tool calls gets one text in their
place, ``<TOOLCALL>[…]</TOOLCALL>``.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from lightning.pytorch.utilities import rank_zero_warn
from transformers import PreTrainedTokenizerBase

from pl_pointwise.errors import DataError

from .messages import Answer, Message, Parts, calls_as_text, parts_of
from .reasoning import THOUGHTS, empty_thought, split_thought

log = logging.getLogger(__name__)

DATE = datetime(2024, 7, 26)
"""The date that a template gets as today's, or a run could not be repeated tomorrow."""

_PROBES = ("probe of an answer", "Another one")
_CALL: dict[str, Any] = {"name": "probe_of_tool_calls", "arguments": {"x": "1"}}
_TOOL: dict[str, Any] = {
    "name": "probe_of_tool_support",
    "description": "A test.",
    "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}},
}
_ASK = {"role": "user", "content": "Hello"}


class ConversationEncoder:
    """Renders prompts and responses by a tokenizer's chat template, and tokenises them.

    Args:
        tokenizer: with a chat template and an end token.
        tools: whether the conversations have tools, which the template must then show.
        template_arguments: the template's other arguments, such as {"enable_thinking": False}.

    Attributes:
        calls_by_template: whether the template has a form for tool calls.
        closing: what ends an assistant's turn, the end token included.
        scaffold: what the template writes in front of every answer that is a text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tools: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template_arguments = dict(template_arguments or {})
        name, end = tokenizer.name_or_path or type(tokenizer).__name__, tokenizer.eos_token
        for what, given in (("end token", end), ("chat template", tokenizer.chat_template)):
            if not given:
                remedy = "Take the instruction-tuned model's, or set it"
                raise DataError(f"The tokenizer {name} has no {what}. {remedy}.")
        assert isinstance(end, str)
        added = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        self._special = sorted({end, *added}, key=len, reverse=True)
        self._thinks = any(mark in tokenizer.get_chat_template() for _, mark in THOUGHTS)
        self._loses_calls = False
        self._probe_texts(end)
        self._probe_calls()
        if tools and _TOOL["name"] not in self._render([_ASK], [_TOOL], "probe"):
            raise DataError(
                f"The chat template of {name} ignores the tools it is given. Use a model trained "
                "to call tools, or a template that shows them."
            )
        if tools and not self.calls_by_template:
            log.warning("%s has no form for tool calls: they are written as <TOOLCALL>…", name)

    def _probe_texts(self, end: str) -> None:
        """Finds how the template writes a text: scaffold, and what closes the turn."""
        self._opening, self._ending = empty_thought(self._render([_ASK], [], "probe"))
        first, second = (self._continuation(Parts(probe)) for probe in _PROBES)
        if not (_PROBES[0] in first and _PROBES[1] in second):
            raise DataError(
                f"The chat template of {self.tokenizer.name_or_path} does not continue its own "
                "generation prompt with an answer. Take another in chat_template."
            )
        # A blank at its end stays in the response: tokenizers join it to the word behind it.
        self.scaffold = _common_prefix(first, second).rstrip(" \t")
        tail = first.partition(_PROBES[0])[2]
        found = re.search("|".join(map(re.escape, self._special)), tail)
        near = found is not None and not tail[: found.start()].strip()
        self.closing = tail[: found.end()] if found and near else end

    def _probe_calls(self) -> None:
        """Finds how the template writes tool calls, if it does, and how text with them."""
        self._call_scaffold, self._call_closing = self.scaffold, self.closing
        self.calls_by_template = self._writes_both = True
        for as_text in (False, True):
            self._arguments_as_text = as_text
            written = self._continuation(Parts(calls=[_CALL]))
            if _CALL["name"] in written:
                break
        else:
            self.calls_by_template = False
            return
        self._call_scaffold = _common_prefix(self.scaffold, written)
        tail = written.rpartition(_CALL["name"])[2]
        marks = re.findall("|".join(map(re.escape, self._special)), tail)
        self._call_closing = marks[-1] if marks else ""
        second = {**_CALL, "name": "another_probe"}
        pair = self._continuation(Parts(calls=[_CALL, second]))
        self._loses_calls = pair != "" and second["name"] not in pair
        both = self._continuation(Parts(_PROBES[0], [_CALL]))
        self._writes_both = _PROBES[0] in both and _CALL["name"] in both

    @property
    def end_ids(self) -> list[int]:
        """Token ids at which a generated answer stops."""
        texts = [text for text in (self.closing, self._call_closing) if text]
        return sorted({self.tokenizer.eos_token_id, *(ids[-1] for ids in self._ids(texts))})

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        where: str,
        answers: Sequence[Answer] = (),
    ) -> str:
        """The text up to where the answer begins, the scaffold of its ``answers`` included."""
        base = self._render(messages, tools, where)
        parts = [self._parts(answer) for answer in answers]
        if any(part.reasoning for part in parts):
            return base
        if self._ending and not base.endswith(self._opening):
            return base  # DeepSeek's, behind the result of a tool
        calls = tools or any(part.calls for part in parts)
        return base + (self._call_scaffold if calls else self.scaffold)

    def response(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        answer: Answer,
        prompt: str,
        where: str,
    ) -> str:
        """The text of an answer behind its prompt, with what ends the turn."""
        parts = self._parts(answer)
        if parts.text and parts.calls and not self._writes_both:
            raise DataError(
                f"{where}: the chat template writes either a text or tool calls, and the answer "
                "has both. Leave one of them out, or change the template."
            )
        whole = self._render([*messages, _said(parts)], tools, where, answered=True)
        text = self._behind(prompt, whole, parts.reasoning)
        if text is None:
            raise DataError(
                f"{where}: with the answer, the chat template renders the conversation before it "
                "differently. Change the template, or take out the record; for a thought there is "
                "no room with enable_thinking=false."
            )
        if parts.reasoning and parts.reasoning.strip() not in text:
            raise DataError(
                f"{where}: the chat template leaves out the thought of an answer. Take it out of "
                "the record, or take the template of a model that reasons."
            )
        place = text.rfind(self.closing)
        if place >= 0:
            return text[: place + len(self.closing)]
        text = text.rstrip()
        return text if text.endswith(tuple(self._special)) else text + self.closing

    def characters(self, response: str) -> int:
        """Characters of a response, without what ends the turn."""
        ending = next((s for s in [self.closing, *self._special] if response.endswith(s)), "")
        return len(response) - len(ending)

    def _behind(self, prompt: str, whole: str, reasoning: str = "") -> str | None:
        """What the whole has behind the prompt, a thought it leaves out put back, or None."""
        if whole.startswith(prompt):
            return whole[len(prompt) :]
        for tail in (self._opening + self._ending, self._opening):
            stem = prompt.removesuffix(tail)
            if stem != prompt and whole.startswith(stem):
                thought = reasoning + self._ending if tail == self._opening else ""
                return thought + whole[len(stem) :]
        return None

    def _continuation(self, parts: Parts) -> str:
        """What the template puts behind its generation prompt for an answer; "" if it cannot."""
        try:
            prompt = self._render([_ASK], [], "probe")
            whole = self._render([_ASK, _said(parts)], [], "probe", answered=True)
            return self._behind(prompt, whole) or ""
        except DataError:
            return ""

    def _parts(self, answer: Answer) -> Parts:
        """The parts of an answer; a thought in the text is separated if the template knows any."""
        parts = parts_of(answer)
        if self._thinks and not parts.reasoning:
            thought, text = split_thought(parts.text)
            parts = Parts(text, parts.calls, thought)
        return parts

    def _turns(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages as the template reads them: calls in its form, results with their call's."""
        turns: list[dict[str, Any]] = []
        waiting: list[dict[str, Any]] = []  # calls without a result yet
        known = 0
        for message in messages:
            turn = dict(message)
            if message["role"] == "tool":  # the result of the call it names, or else of the first
                given = message.get("tool_call_id")
                call = next((each for each in waiting if given in (None, each["given"])), None)
                if call is not None:
                    waiting.remove(call)
                    name = call["function"]["name"]
                    turn = {"name": name, **turn, "tool_call_id": call["id"]}
            if thought := message.get("reasoning_content"):
                turn["thinking"] = thought  # another name that templates have for it
            if calls := turn.pop("tool_calls", None):
                if turn["content"] and not self._writes_both:
                    rank_zero_warn(  # which Python shows once
                        f"The chat template of {self.tokenizer.name_or_path} writes either a text "
                        "or tool calls: in turns that have both, the text is left out."
                    )
                    turn["content"] = ""
                functions = [call["function"] for call in calls]
                written = [self._call(each, place) for place, each in enumerate(functions, known)]
                pairs = zip(calls, written, strict=True)
                waiting = [{**new, "given": call.get("id")} for call, new in pairs]
                known += len(calls)
                if self.calls_by_template:
                    turn["tool_calls"] = written
                else:
                    parts = [turn["content"], calls_as_text(functions)]
                    turn["content"] = "\n".join(filter(None, parts))
            turns.append(turn)
        return turns

    def _call(self, function: Message, place: int) -> dict[str, Any]:
        """A call as templates read it; nine letters and digits is all that Mistral's takes."""
        arguments = function["arguments"]
        if self._arguments_as_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {**function, "arguments": arguments}
        return {"type": "function", "id": f"call{place:05d}", "function": function}

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        where: str,
        answered: bool = False,
    ) -> str:
        """The conversation, up to where the assistant begins unless it is ``answered``."""
        turns = self._turns(messages)
        if self._loses_calls and any(len(each.get("tool_calls") or ()) > 1 for each in turns):
            raise DataError(
                f"{where}: the chat template writes one tool call a turn, and there are several. "
                "Give each a turn of its own, followed by its result, or take the record out."
            )
        listed = [
            dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)}
            for tool in tools
        ]
        try:
            text = self.tokenizer.apply_chat_template(
                turns,
                tools=listed or None,
                chat_template=_with_date(self.tokenizer.get_chat_template(tools=listed or None)),
                add_generation_prompt=not answered,
                tokenize=False,
                **self.template_arguments,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise DataError(
                f"{where}: the chat template refuses this conversation ({error}). Change the "
                "record to what the model's format allows, or take it out."
            ) from error
        assert isinstance(text, str)
        return text

    def encode(
        self, prompts: Sequence[str], responses: Sequence[Sequence[str]]
    ) -> list[tuple[list[int], list[list[int]]]]:
        """Token ids of each prompt and of each of its responses.

        What the whole has behind the prompt's; where a tokenizer joins the two, those alone.
        """
        whole = [p + text for p, texts in zip(prompts, responses, strict=True) for text in texts]
        encoded = self._ids([*prompts, *whole])
        rest = iter(encoded[len(prompts) :])

        def behind(prompt: list[int], text: str) -> list[int]:
            ids, seam = next(rest), len(prompt)
            return ids[seam:] if ids[:seam] == prompt else self._alone(text)

        return [
            (prompt, [behind(prompt, text) for text in texts])
            for prompt, texts in zip(encoded[: len(prompts)], responses, strict=True)
        ]

    def _alone(self, text: str) -> list[int]:
        """Token ids of a text within a line: at its start some tokenizers put a blank in front."""
        line, whole, alone = self._ids(["\n", "\n" + text, text])
        return whole[len(line) :] if whole[: len(line)] == line else alone

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = []
        if texts:
            ids = self.tokenizer(list(texts), add_special_tokens=False).input_ids
        return ids


def _with_date(template: str) -> str:
    """The template with :data:`DATE` for the day's date."""
    asked = r"strftime_now\(\s*(['\"])(.*?)\1\s*\)"
    return re.sub(asked, lambda found: repr(DATE.strftime(found[2])), template)


def _common_prefix(first: str, second: str) -> str:
    pairs = enumerate(zip(first, second, strict=False))
    return first[: next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))]


def _said(parts: Parts) -> Message:
    """An answer as a message."""
    calls = [{"function": call} for call in parts.calls]
    given = {"tool_calls": calls, "reasoning_content": parts.reasoning}
    return {"role": "assistant", "content": parts.text} | {k: v for k, v in given.items() if v}
