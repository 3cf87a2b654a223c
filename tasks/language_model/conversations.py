"""From a conversation and an answer to the token ids of a prompt and a response.

Everything is rendered by the tokenizer's own chat template:

    prompt     messages, the tools with them, up to where the answer begins
    response   what the template writes for the answer, up to and with the token that ends the turn

so that the prompt's tokens are a prefix of the whole's, the response is what the model itself would
have to generate, and a token that begins a sequence stands where the template puts it, once.

What a template writes in front of every answer (its *scaffold*: an empty thought as
``<think></think>``, a channel's name) belongs to the prompt, in training and in generation: it is
found on two answers that have nothing in common. Where a generation prompt begins a thought
and the template leaves thoughts out of what was said, as DeepSeek's, the scaffold ends it. In a
conversation with tools the scaffold is what answers and tool calls have in common, so that the
choice between them stays in the response. An answer that brings a thought of its own is not behind
an empty one: its prompt ends where the assistant begins, and the thought is part of the response.

An answer is a text, a list of tool calls, [{"name": …, "arguments": {…}}], or a turn of several of
text, calls and thought (messages.py). Calls are handed to the template as ``tool_calls``. A
template without a form for them gets one text in their place, ``<TOOLCALL>[…]</TOOLCALL>``.
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
"""What a template is told that today is, or a run could not be repeated tomorrow."""

_PROBES = ("probe of an answer", "Another one")
_CALL: dict[str, Any] = {"name": "probe_of_tool_calls", "arguments": {"x": "1"}}
_TOOL = {
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
        template_arguments: what else the template is told, such as {"enable_thinking": False}.

    Attributes:
        calls_by_template: whether the template has a form for tool calls.
        closing: what ends an assistant's turn, the end token included.
        scaffold: what the template writes in front of every answer that is a text.

    Raises:
        ValueError: no end token, no chat template, one that ignores tools, or one that does not
            continue its own generation prompt.
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
        if not isinstance(end, str):
            raise ValueError(
                f"The tokenizer {name} has no end token, so no response would ever end. Set its "
                "eos_token to the token that closes an answer in the model's format."
            )
        if not tokenizer.chat_template:
            raise ValueError(
                f"The tokenizer {name} has no chat template. Take the instruction-tuned model's, "
                "or set chat_template."
            )
        added = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        self._special = sorted({end, *added}, key=len, reverse=True)
        self._thinks = any(mark in tokenizer.get_chat_template() for _, mark in THOUGHTS)
        self._loses_calls = False
        self._probe_texts(end)
        self._probe_calls()
        if tools and _TOOL["name"] not in self._render([_ASK], [_TOOL], "probe"):
            raise ValueError(
                f"The chat template of {name} ignores the tools it is given, so the model would "
                "never see them. Use a model trained to call tools, or a template that shows them."
            )
        if tools and not self.calls_by_template:
            log.warning(
                "The chat template of %s has no form for tool calls: they are written as "
                "<TOOLCALL>[…]</TOOLCALL>, in training and in evaluation alike.",
                name,
            )

    def _probe_texts(self, end: str) -> None:
        """Finds how the template writes a text: scaffold, and what closes the turn."""
        self._opening, self._ending = empty_thought(self._render([_ASK], [], "probe"))
        first, second = (self._continuation(Parts(probe)) for probe in _PROBES)
        if not (_PROBES[0] in first and _PROBES[1] in second):
            raise ValueError(
                f"The chat template of {self.tokenizer.name_or_path} does not continue its own "
                "generation prompt with an answer. Take another in chat_template."
            )
        # A blank at its end stays in the response: tokenizers join it to the word behind it.
        self.scaffold: str = _common_prefix(first, second).rstrip(" \t")
        tail = first.partition(_PROBES[0])[2]
        found = re.search("|".join(map(re.escape, self._special)), tail)
        near = found is not None and not tail[: found.start()].strip()
        self.closing = tail[: found.end()] if found and near else end

    def _probe_calls(self) -> None:
        """Finds how the template writes tool calls, if it does, and how text beside them."""
        self._call_scaffold, self._call_closing = self.scaffold, self.closing
        self.calls_by_template = self._writes_both = True
        for self._arguments_as_text in (False, True):
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

    # Texts ----------------------------------------------------------------------------------------

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        where: str,
        answers: Sequence[Answer] = (),
    ) -> str:
        """The text up to where the answer begins, the scaffold included.

        answers: those it is the prompt of, which decide about the scaffold: calls and texts share
            theirs, and there is none in front of an answer with a thought.

        Raises:
            DataError: the template refuses the conversation.
        """
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
        """The text of an answer behind its prompt, with what ends the turn.

        Raises:
            DataError: the template refuses the answer, loses a part of it, or does not begin with
                the prompt.
        """
        parts = self._parts(answer)
        if parts.text and parts.calls and not self._writes_both:
            raise DataError(
                f"{where}: the chat template writes either a text or tool calls, and the answer "
                "has both. Leave one of them out, or change the template."
            )
        known = sum(len(message.get("tool_calls") or ()) for message in messages)
        whole = self._render(messages, tools, where, self._turn(parts, known))
        text = self._behind(prompt, whole, parts.reasoning)
        if text is None:
            thought = " (It has a thought: enable_thinking=false leaves no room for one.)"
            raise DataError(
                f"{where}: with the answer, the chat template renders the conversation before it "
                "differently, so the prompt is no prefix of the whole. Change the template, or "
                "take out the record." + thought * bool(parts.reasoning)
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
        """What the whole has behind the prompt, None if it does not begin with it.

        Where the template leaves a thought that the prompt begins out of the whole, as if it did
        not, with the thought.
        """
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
            return self._behind(prompt, self._render([_ASK], [], "probe", self._turn(parts))) or ""
        except DataError:
            return ""

    # Turns ----------------------------------------------------------------------------------------

    def _parts(self, answer: Answer) -> Parts:
        """The parts of an answer; a thought in the text is told apart if the template knows any."""
        parts = parts_of(answer)
        if self._thinks and not parts.reasoning:
            thought, text = split_thought(parts.text)
            parts = Parts(text, parts.calls, thought)
        return parts

    def _turn(self, parts: Parts, known: int = 0) -> dict[str, Any]:
        """The assistant's turn as the template reads it, behind ``known`` calls."""
        turn: dict[str, Any] = {"role": "assistant", "content": parts.text}
        if parts.reasoning:  # under the names that templates have for it
            turn |= {"reasoning_content": parts.reasoning, "thinking": parts.reasoning}
        if not parts.calls:
            return turn
        if not self.calls_by_template:
            text = "\n".join(filter(None, [parts.text, calls_as_text(parts.calls)]))
            return turn | {"content": text}
        turn["tool_calls"] = []
        for place, call in enumerate(parts.calls, start=known):
            arguments = call["arguments"]
            if self._arguments_as_text:
                arguments = json.dumps(arguments, ensure_ascii=False)
            function = {**call, "arguments": arguments}
            listed = {"type": "function", "id": _identifier(place), "function": function}
            turn["tool_calls"].append(listed)
        return turn

    def _turns(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages as the template reads them: calls in its form, results with their call's."""
        turns: list[dict[str, Any]] = []
        waiting: list[dict[str, Any]] = []  # calls without a result yet
        known = 0
        for message in messages:
            if message["role"] == "tool":  # the result of the call it names, or else of the first
                given = message.get("tool_call_id")
                call = next((each for each in waiting if given in (None, each["given"])), None)
                if call is not None:
                    waiting.remove(call)
                    message = {"name": call["name"], **message, "tool_call_id": call["id"]}
            calls = message.get("tool_calls") or []
            thought = message.get("reasoning_content", "")
            if not calls and not thought:
                turns.append(dict(message))
                continue
            text = message["content"]
            if text and calls and not self._writes_both:
                rank_zero_warn(  # which Python shows once
                    f"The chat template of {self.tokenizer.name_or_path} writes either a text or "
                    "tool calls: in turns that have both, the text is left out."
                )
                text = ""
            functions = [call["function"] for call in calls]
            turns.append(self._turn(Parts(text, functions, thought), known))
            waiting = [
                {"given": call.get("id"), "id": _identifier(known + i), "name": function["name"]}
                for i, (call, function) in enumerate(zip(calls, functions, strict=True))
            ]
            known += len(calls)
        return turns

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        where: str,
        turn: Message | None = None,
    ) -> str:
        """The conversation up to where the assistant begins, or with its ``turn``."""
        turns = [*self._turns(messages), *([] if turn is None else [dict(turn)])]
        if self._loses_calls and any(len(each.get("tool_calls") or ()) > 1 for each in turns):
            raise DataError(
                f"{where}: the chat template writes one tool call a turn, and there are several. "
                "Give each a turn of its own, followed by its result, or take the record out."
            )
        listed = [_wrapped(tool) for tool in tools] or None
        try:
            text = self.tokenizer.apply_chat_template(
                turns,
                tools=listed,
                chat_template=_with_date(self.tokenizer.get_chat_template(tools=listed)),
                add_generation_prompt=turn is None,
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

    # Tokens ---------------------------------------------------------------------------------------

    def encode(
        self, prompts: Sequence[str], responses: Sequence[Sequence[str]]
    ) -> list[tuple[list[int], list[list[int]]]]:
        """Token ids of each prompt and of each of its responses.

        The response's ids are what the whole text has behind the prompt's; where a tokenizer joins
        the two at the seam, those of the response alone, as after generation.
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
        if not texts:
            return []
        ids: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False).input_ids
        return ids


def _with_date(template: str) -> str:
    """The template with :data:`DATE` for the day's date, if it asks for that."""
    if "strftime_now" not in template:
        return template
    values = {f"%{letter}": DATE.strftime(f"%{letter}") for letter in "aAbBdmyYjHIMSp"}
    values = {f"%-{name[1]}": value.lstrip("0") for name, value in values.items()} | values
    filters = "".join(f"|replace('{name}','{value}')" for name, value in values.items())
    # The line's end belongs to the macro: chat templates are compiled with trim_blocks.
    return (
        f"{{% macro strftime_now(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}\n{template}"
    )


def _common_prefix(first: str, second: str) -> str:
    pairs = enumerate(zip(first, second, strict=False))
    return first[: next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))]


def _identifier(place: int) -> str:
    """Nine letters and digits: the only identifiers of calls that Mistral's template takes."""
    return f"call{place:05d}"


def _wrapped(tool: Message) -> dict[str, Any]:
    """A tool in the form that chat templates read."""
    if tool.get("type") == "function" and isinstance(tool.get("function"), Mapping):
        return dict(tool)
    return {"type": "function", "function": dict(tool)}
