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
template without a form for them gets one text in their place, ``<TOOLCALL>[…]</TOOLCALL>``, the
same everywhere.

Some templates put the day's date into the prompt. Here it is always :data:`DATE`, or a run could
neither be resumed nor repeated tomorrow.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from jinja2 import TemplateError
from lightning.pytorch.utilities import rank_zero_warn
from transformers import PreTrainedTokenizerBase

from pl_pointwise.errors import DataError

from .loading import check_tokenizer
from .messages import Answer, Message, Parts, calls_as_text, parts_of
from .reasoning import THOUGHTS, empty_thought, split_thought

log = logging.getLogger(__name__)

DATE = datetime(2024, 7, 26)
"""What a template is told that today is: the date Llama 3's writes where it is told none."""

_PROBES = ("probe of an answer", "Another one")
_CALL: dict[str, Any] = {"name": "probe_of_tool_calls", "arguments": {"x": "1"}}
Form = Literal["object", "text"]
_FORMS: tuple[Form, ...] = ("object", "text")
"""How templates want the arguments of a call."""
_THOUGHT_REMEDY = " (It has a thought: enable_thinking=false leaves no room for one.)"
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
        ValueError: see :func:`pl_pointwise.tasks.language_model.loading.check_tokenizer`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tools: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.template_arguments = dict(template_arguments or {})
        check_tokenizer(tokenizer, tools=tools)
        self.tokenizer = tokenizer
        end = tokenizer.eos_token
        assert isinstance(end, str)
        added = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        self._special = sorted({end, *added}, key=len, reverse=True)
        template = tokenizer.get_chat_template()
        self._thinks = any(mark in template for _, mark in THOUGHTS)
        self._loses_calls = False
        self._probe_texts(end)
        self._probe_calls()
        if tools and not self.calls_by_template:
            log.warning(
                "The chat template of %s has no form for tool calls: they are written as "
                "<TOOLCALL>[…]</TOOLCALL>, in training and in evaluation alike.",
                tokenizer.name_or_path,
            )

    def _probe_texts(self, end: str) -> None:
        """Finds how the template writes a text: scaffold, and what closes the turn."""
        self.closing, self.scaffold = end, ""
        base = self._render([_ASK], [], "probe")
        self._opening, self._ending = empty_thought(base)
        written = [self._continuation({"role": "assistant", "content": p}) for p in _PROBES]
        first, second = (text or "" for text in written)
        if not (_PROBES[0] in first and _PROBES[1] in second):
            raise ValueError(
                f"The chat template of {self.tokenizer.name_or_path} does not continue its own "
                "generation prompt with an answer. Take another in chat_template."
            )
        # A blank at its end stays in the response: tokenizers join it to the word behind it.
        self.scaffold = _beginning_of_both(first, second).rstrip(" \t")
        self.closing = self._closing_of(first.partition(_PROBES[0])[2]) or end

    def _probe_calls(self) -> None:
        """Finds how the template writes tool calls, if it does, and how text beside them."""
        self._form: Form | None = None
        self._call_scaffold, self._call_closing = self.scaffold, self.closing
        self._text_beside_calls = False
        for form in _FORMS:
            self._form = form
            written = self._continuation(self._turn(Parts(calls=[_CALL]), 0)) or ""
            if _CALL["name"] in written:
                break
        else:
            self._form = None
            return
        self._call_scaffold = _beginning_of_both(self.scaffold, written)
        self._call_closing = self._closing_of(written.rpartition(_CALL["name"])[2], last=True)
        second = {**_CALL, "name": "another_probe"}
        pair = self._continuation(self._turn(Parts(calls=[_CALL, second]), 0))
        self._loses_calls = pair is not None and second["name"] not in pair
        both = self._continuation(self._turn(Parts(_PROBES[0], [_CALL]), 0)) or ""
        self._text_beside_calls = _PROBES[0] in both and _CALL["name"] in both

    @property
    def calls_by_template(self) -> bool:
        return self._form is not None

    def _closing_of(self, tail: str, last: bool = False) -> str:
        """What stands behind an answer up to its first, or last, special token; "" if none."""
        found = list(re.finditer("|".join(map(re.escape, self._special)), tail))
        if not found:
            return ""
        if last:
            return found[-1].group()
        return "" if tail[: found[0].start()].strip() else tail[: found[0].end()]

    @property
    def end_ids(self) -> list[int]:
        """Token ids at which a generated answer stops."""
        closings = [text for text in (self.closing, self._call_closing) if text]
        last = {self._ids([text])[0][-1] for text in closings}
        end = self.tokenizer.eos_token_id
        assert isinstance(end, int)
        return sorted({end, *last})

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
        return base + (
            self._call_scaffold if tools or any(part.calls for part in parts) else self.scaffold
        )

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
        if parts.text and parts.calls and self.calls_by_template and not self._text_beside_calls:
            raise DataError(
                f"{where}: the chat template writes either a text or tool calls, and the answer "
                "has both. Leave one of them out, or change the template."
            )
        known = sum(len(message.get("tool_calls") or ()) for message in messages)
        whole = self._render(messages, tools, where, self._turn(parts, known))
        text = self._behind(prompt, whole, parts.reasoning)
        if text is None:
            raise DataError(
                f"{where}: with the answer, the chat template renders the conversation before it "
                "differently, so the prompt is no prefix of the whole. Change the template, or "
                "take out the record." + _THOUGHT_REMEDY * bool(parts.reasoning)
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

    def _behind(self, prompt: str, whole: str, reasoning: str = "") -> str | None:
        """What the whole has behind the prompt, None if it does not begin with it.

        Where the template leaves a thought that the prompt begins out of the whole, as if it did
        not, with the thought.
        """
        if whole.startswith(prompt):
            return whole[len(prompt) :]
        for tail in (self._opening + self._ending, self._opening):
            stem = prompt.removesuffix(tail)
            if tail and stem != prompt and whole.startswith(stem):
                thought = reasoning + self._ending if tail == self._opening else ""
                return thought + whole[len(stem) :]
        return None

    def _parts(self, answer: Answer) -> Parts:
        """The parts of an answer; a thought in the text is told apart if the template knows any."""
        parts = parts_of(answer)
        if self._thinks and not parts.reasoning:
            thought, text = split_thought(parts.text)
            parts = Parts(text, parts.calls, thought)
        return parts

    def _turn(self, parts: Parts, known: int) -> dict[str, Any]:
        """The assistant's turn as the template reads it.

        known: how many calls there are before it, by which its own are numbered.
        """
        turn: dict[str, Any] = {"role": "assistant", "content": parts.text}
        if parts.reasoning:  # under the names that templates have for it
            turn |= {"reasoning_content": parts.reasoning, "thinking": parts.reasoning}
        if not parts.calls:
            return turn
        if self._form is None:
            text = "\n".join(filter(None, [parts.text, calls_as_text(parts.calls)]))
            return turn | {"content": text}
        turn["tool_calls"] = []
        for place, call in enumerate(parts.calls, start=known):
            arguments = call["arguments"]
            if self._form == "text":
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
            if message["role"] == "tool":
                turns.append(_result(message, waiting))
                continue
            calls = message.get("tool_calls") or []
            thought = message.get("reasoning_content", "")
            if not calls and not thought:
                turns.append(dict(message))
                continue
            flat = [call["function"] for call in calls]
            text = message["content"]
            if text and flat and self._form and not self._text_beside_calls:
                rank_zero_warn(  # which Python shows once
                    f"The chat template of {self.tokenizer.name_or_path} writes either a text or "
                    "tool calls: in turns that have both, the text is left out."
                )
                text = ""
            turns.append(self._turn(Parts(text, flat, thought), known))
            waiting = [
                {"given": call.get("id"), "id": _identifier(place), "name": function["name"]}
                for place, (call, function) in enumerate(zip(calls, flat, strict=True), known)
            ]
            known += len(calls)
        return turns

    def characters(self, response: str) -> int:
        """Characters of a response, without what ends the turn."""
        ending = next((s for s in [self.closing, *self._special] if response.endswith(s)), "")
        return len(response) - len(ending)

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
        found = []
        for prompt, texts in zip(encoded[: len(prompts)], responses, strict=True):
            answers = []
            for text in texts:
                ids = next(rest)
                seam = len(prompt)
                answers.append(ids[seam:] if ids[:seam] == prompt else self._alone(text))
            found.append((prompt, answers))
        return found

    def _alone(self, text: str) -> list[int]:
        """Token ids of a text within a line: at its start some tokenizers put a blank in front."""
        line, whole, alone = self._ids(["\n", "\n" + text, text])
        return whole[len(line) :] if whole[: len(line)] == line else alone

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        ids: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False).input_ids
        return ids

    def _continuation(self, turn: Message) -> str | None:
        """What the template puts behind its generation prompt for this turn; None if it cannot."""
        try:
            prompt = self._render([_ASK], [], "probe")
            whole = self._render([_ASK], [], "probe", turn)
        except DataError:
            return None
        return self._behind(prompt, whole)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        where: str,
        turn: Message | None = None,
    ) -> str:
        """The conversation up to where the assistant begins, or with its ``turn``."""
        listed = [_wrapped(tool) for tool in tools] or None
        turns = [*self._turns(messages), *([] if turn is None else [dict(turn)])]
        if self._loses_calls and any(len(each.get("tool_calls") or ()) > 1 for each in turns):
            raise DataError(
                f"{where}: the chat template writes one tool call a turn, and there are several. "
                "Give each a turn of its own, followed by its result, or take the record out."
            )
        try:
            text = self.tokenizer.apply_chat_template(
                turns,
                tools=listed,
                chat_template=with_fixed_date(self.tokenizer.get_chat_template(tools=listed)),
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


def with_fixed_date(template: str) -> str:
    """The template with :data:`DATE` for the day's date, if it asks for that."""
    if "strftime_now" not in template:
        return template
    filters = "".join(
        f"|replace('%-{letter}','{DATE.strftime(f'%{letter}').lstrip('0')}')"
        f"|replace('%{letter}','{DATE.strftime(f'%{letter}')}')"
        for letter in "aAbBdmyYjHIMSp"
    )
    # The line's end belongs to the macro: chat templates are compiled with trim_blocks.
    return (
        f"{{% macro strftime_now(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}\n{template}"
    )


def _beginning_of_both(first: str, second: str) -> str:
    """What two texts have in common from their beginning on."""
    pairs = enumerate(zip(first, second, strict=False))
    return first[: next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))]


def _identifier(place: int) -> str:
    """Nine letters and digits: the only identifiers of calls that Mistral's template takes."""
    return f"call{place:05d}"


def _result(message: Message, waiting: list[dict[str, Any]]) -> dict[str, Any]:
    """What a tool gave back, with the name and identifier of its call, which waits no longer.

    That is the call that the result names, or else the first without a result.
    """
    given = message.get("tool_call_id")
    call = next((call for call in waiting if given is None or call["given"] == given), None)
    if call is None:
        return dict(message)
    waiting.remove(call)
    return {"name": call["name"], **message, "tool_call_id": call["id"]}


def _wrapped(tool: Message) -> dict[str, Any]:
    """A tool in the form that chat templates read."""
    if tool.get("type") == "function" and isinstance(tool.get("function"), Mapping):
        return dict(tool)
    return {"type": "function", "function": dict(tool)}
