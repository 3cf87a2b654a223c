"""What a tokenizer's chat template writes for a conversation, and that it leaves nothing out.

:meth:`ChatTemplate.render` writes a record's conversation, with an answer or up to where the
assistant begins. Templates leave out what they have no place for, in silence. So every text that is
given is looked for in what was rendered, and a record of which one is missing is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.records import shown

from .messages import Message, Parts
from .reasoning import THOUGHTS, Marks, split_thought
from .records import Record
from .template_source import arguments_of, marks_in

DATE = datetime(2024, 7, 26)
"""The date that a template gets as today's, or a run could not be repeated tomorrow."""
_TODAY = r"strftime_now\(\s*(['\"])(.*?)\1\s*\)"


@dataclass(frozen=True)
class CallForm:
    """How a template takes the tool calls of a turn.

    Args:
        ids: what a call gets that brings no id, of its {place} among the calls and its {name}.
        arguments_as_text: whether arguments are their JSON, and not an object.
        at_most: calls in one turn; 0 where the template has no form for them.
        why_none: why it has none.
    """

    ids: str = "call{place:05d}"
    arguments_as_text: bool = False
    at_most: float = math.inf
    why_none: str = ""

    def of(self, call: Mapping[str, Any], number: int) -> dict[str, Any]:
        """A call as the template reads it, with an id, made of its number if it has none."""
        function = call["function"]
        if self.arguments_as_text:
            text = json.dumps(function["arguments"], ensure_ascii=False)
            function = {**function, "arguments": text}
        made = self.ids.format(place=number, name=function["name"])
        return {"type": "function", "id": call.get("id", made), "function": function}


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template with its arguments, and what is known of it so far.

    Args:
        tokenizer: with a chat template and an end token.
        arguments: the template's other arguments, such as {"enable_thinking": False}.
        source: the template's text; of several (one for tools) all.
        hint: a sentence with the names of its own arguments, for messages.
        tokens: a pattern of the tokens that were added to the tokenizer, its end token among them.
        thoughts: what begins and what ends a thought, the template's own first.
        reads_thoughts: whether the source speaks of thoughts: those of earlier turns may be gone.
        calls: how it takes tool calls.
    """

    tokenizer: PreTrainedTokenizerBase
    arguments: Mapping[str, Any]
    source: str
    hint: str
    tokens: str
    thoughts: Marks
    reads_thoughts: bool
    calls: CallForm = CallForm()

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]
    ) -> ChatTemplate:
        """The template of a tokenizer.

        Raises:
            DataError: no end token, no template, or an argument that is not in the template.
        """
        for part, value in {
            "end token": tokenizer.eos_token,
            "chat template": tokenizer.chat_template,
        }.items():
            if not value:
                remedy = "Take the instruction-tuned model's, or set it"
                raise DataError(
                    f"The tokenizer {name_of(tokenizer)} has no {part}. {remedy}."
                )
        source = _whole_source(tokenizer)
        known = arguments_of(source)
        hint = ""
        if known:
            hint = f" The template's own arguments are: {', '.join(sorted(known))}."
        _check_arguments(arguments, known, hint)
        added = [token.content for token in tokenizer.added_tokens_decoder.values()]
        thoughts = [*dict.fromkeys([*marks_in(source), *THOUGHTS])]
        return cls(
            tokenizer=tokenizer,
            arguments=arguments,
            source=source,
            hint=hint,
            tokens=any_of([str(tokenizer.eos_token), *added]),
            thoughts=thoughts,
            reads_thoughts=any(end in source for _, end in thoughts),
        )

    def render(
        self, record: Record, answer: Parts | None = None, *, whole: bool = True
    ) -> str:
        """The conversation with an answer, of which with ``whole`` the text has to be in it.

        Without one, up to where the assistant begins.
        """
        messages = record.messages
        where = record.where
        if answer is not None:
            messages = [*messages, _reply(answer)]
        turns = self._turns(messages)
        self._check_number_of_calls(turns, where)
        tools = [_as_listed(tool) for tool in record.tools]
        text = self._apply(turns, tools, where, generation=answer is None)
        if answer is not None:
            # The conversation in front of it was rendered, and looked through, without it.
            if whole:
                must_hold(answer.text, text, where, "the text of an answer")
            return text
        for tool in tools:
            must_hold(tool["function"]["name"], text, where, "a tool")
        for turn in turns:
            self._must_hold_turn(turn, text, where)
        return text

    def _apply(
        self,
        turns: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        where: str,
        *,
        generation: bool,
    ) -> str:
        """What the template writes; a DataError with its reason where it refuses."""
        try:
            # Some tokenizers have a template of its own for tools (Command R).
            source = self.tokenizer.get_chat_template(tools=tools or None)
            dated = re.sub(_TODAY, lambda asked: repr(DATE.strftime(asked[2])), source)
            text = self.tokenizer.apply_chat_template(
                turns,
                tools=tools or None,
                chat_template=dated,
                add_generation_prompt=generation,
                tokenize=False,
                **self.arguments,
            )
        # A template raises TemplateError itself; Python the others, as of a text added to None.
        except (TemplateError, TypeError, ValueError) as error:
            raise DataError(
                f"{where}: the chat template refuses this conversation ({error}). Change the "
                "record to what the model's format allows, or take it out."
            ) from error
        assert isinstance(text, str)
        return text

    def _turns(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages as the template reads them: calls in its form, results with their call's."""
        turns: list[dict[str, Any]] = []
        # (id, call) without a result yet
        waiting: list[tuple[Any, dict[str, Any]]] = []
        known = 0
        for message in messages:
            turn = dict(message)
            if message["role"] == "tool":
                turn = _with_its_call(turn, waiting)
            thought = message.get("reasoning_content")
            if thought:
                turn["thinking"] = thought  # another name that templates have for it
            calls = turn.pop("tool_calls", None)
            # An empty list is left out: Llama 3.1's template asks only whether there is a list.
            if calls:
                waiting = []
                for call in calls:
                    waiting.append(
                        (call.get("id", call.get("named")), self.calls.of(call, known))
                    )
                    known += 1
                turn["tool_calls"] = [call for _, call in waiting]
            turns.append(turn)
        return turns

    def _check_number_of_calls(
        self, turns: Sequence[Mapping[str, Any]], where: str
    ) -> None:
        """Refuses turns with more tool calls than the template writes."""
        most = max(len(turn.get("tool_calls") or ()) for turn in turns)
        if most and not self.calls.at_most:
            raise DataError(
                f"{where}: the chat template has no form for tool calls ({self.calls.why_none}). "
                "Take another in chat_template, or take the record out."
            )
        if most > self.calls.at_most:
            raise DataError(
                f"{where}: the chat template takes at most {self.calls.at_most} tool calls a turn "
                f"(here: {most}). Take another in chat_template, give each call its own turn, "
                "followed by its result, or take the record out."
            )

    def _must_hold_turn(self, turn: Mapping[str, Any], text: str, where: str) -> None:
        """Refuses a turn of which the template left something out of the text."""
        content = turn["content"]
        # Templates drop the thoughts of earlier answers.
        if turn["role"] == "assistant" and self.reads_thoughts:
            content = split_thought(content, self.thoughts)[1]
        must_hold(content, text, where, f"a turn of role {turn['role']}")
        for call in turn.get("tool_calls") or ():
            name = call["function"]["name"]
            must_hold(name, text, where, "a tool call of an earlier turn")

    def differs(self, where: str) -> DataError:
        """The error of a record that the template renders in another way with its answer."""
        settings = []
        for name, value in self.arguments.items():
            settings.append(f"{name}={json.dumps(value)}")
        return DataError(
            f"{where}: with the answer, the chat template renders the conversation before it "
            "differently. Take another in chat_template, or take out the record; for a thought, or "
            "its marks in a text, there is no room with "
            f"{', '.join(settings) or 'its defaults'}."
            f"{self.hint}"
        )


def name_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """What messages call a tokenizer."""
    return tokenizer.name_or_path or type(tokenizer).__name__


def any_of(tokens: Sequence[str]) -> str:
    """A pattern of these tokens, of two that begin alike the longer one."""
    return "|".join(map(re.escape, sorted(set(tokens), key=len, reverse=True)))


def must_hold(text: str, rendered: str, where: str, what: str, hint: str = "") -> None:
    """Refuses a record of which a text is not in what the template made, as it is or as JSON."""
    # Many templates trim the texts of their turns.
    if text.strip() in rendered:
        return
    forms = [text]
    # Templates write arguments of calls by tojson: letters beyond ASCII as they are, or escaped.
    for ensure_ascii in (False, True):
        forms.append(json.dumps(text, ensure_ascii=ensure_ascii)[1:-1])
    whole = "".join(rendered.split())  # Falcon's joins paragraphs.
    if not any("".join(form.split()) in whole for form in forms):
        raise DataError(
            f"{where}: the chat template leaves out {what}, or changes it: {shown(text)}. Change "
            "the record to what the model's format has, or take it out, or take another template "
            f"in chat_template.{hint}"
        )


def _check_arguments(
    arguments: Mapping[str, Any], known: frozenset[str] | None, hint: str
) -> None:
    """Refuses arguments that the template does not have, and truth values in quotes.

    known: the template's own; None where its source could not be read, and any name may be one.
    """
    for name, value in arguments.items():
        # jinja would leave it out in silence, and a misspelt switch would do nothing.
        if known is not None and name not in known:
            raise DataError(
                f"template_arguments: the chat template has no {name}."
                f"{hint or ' It has none.'}"
            )
        if isinstance(value, str) and value.lower() in ("true", "false"):
            raise DataError(
                f"template_arguments: {name} is the text {value!r}, which every template takes "
                f"for true. Write {name}: {value.lower()} without quotes."
            )


def _whole_source(tokenizer: PreTrainedTokenizerBase) -> str:
    """The template, of several (one for tools) all."""
    template: Any = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else str(template)


def _reply(answer: Parts) -> dict[str, Any]:
    """The assistant's message that an answer is, as templates take it."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.calls:
        message["tool_calls"] = [{"function": call} for call in answer.calls]
    if answer.reasoning:
        # The name that Qwen's and DeepSeek's templates have for it.
        message["reasoning_content"] = answer.reasoning
    return message


def _with_its_call(
    turn: dict[str, Any], waiting: list[tuple[Any, dict[str, Any]]]
) -> dict[str, Any]:
    """The result of the call that it names, or else of the first that waits for one."""
    named = turn.get("tool_call_id")
    for entry in waiting:
        call_id, call = entry
        if named in (None, call_id):
            waiting.remove(entry)
            return {
                "name": call["function"]["name"],
                **turn,
                "tool_call_id": call["id"],
            }
    return turn


def _as_listed(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in the form that chat templates take."""
    if "function" in tool:
        return dict(tool)
    return {"type": "function", "function": dict(tool)}
