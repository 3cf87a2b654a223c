"""From a conversation and an answer to the token ids of a prompt and a response.

Everything is rendered by the tokenizer's own chat template:

    prompt     messages, the tools with them, up to where the assistant begins to speak
    response   what the template puts behind the prompt for the answer, up to and with the token
               that ends the turn

so that the prompt's tokens are a prefix of the whole's, the response is what the model itself would
have to generate, and a token that begins a sequence stands where the template puts it, once.

An answer is a text or a list of tool calls, [{"name": …, "arguments": {…}}]. Calls are handed to
the template as ``tool_calls``. A template without a form for them gets one text in their place,
``<TOOLCALL>[…]</TOOLCALL>``, the same everywhere.

Some templates put the day's date into the prompt. Here it is always :data:`DATE`, or a run could
neither be resumed nor repeated tomorrow.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from pl_pointwise.errors import DataError

from .loading import check_tokenizer

log = logging.getLogger(__name__)

DATE = datetime(2024, 7, 26)
"""What a template is told that today is: the date Llama 3's writes where it is told none."""

Message = Mapping[str, Any]
Answer = str | list[dict[str, Any]]
"""A text, or tool calls."""


class ConversationEncoder:
    """Renders prompts and responses by a tokenizer's chat template, and tokenises them.

    Args:
        tokenizer: with a chat template and an end token.
        tools: whether the conversations have tools, which the template must then show.

    Attributes:
        calls_by_template: whether the template has a form for tool calls.
        closing: what ends an assistant's turn, the end token included.

    Raises:
        ValueError: see :func:`pl_pointwise.tasks.language_model.loading.check_tokenizer`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, tools: bool = False) -> None:
        check_tokenizer(tokenizer, tools=tools)
        self.tokenizer = tokenizer
        end = tokenizer.eos_token
        assert isinstance(end, str)
        added = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        self._special = sorted({end, *added}, key=len, reverse=True)
        self.closing = end
        probe = "probe of an answer"
        continued = self._continuation({"role": "assistant", "content": probe})
        self._continues = continued is not None and probe in continued
        if not self._continues:
            log.warning(
                "The chat template of %s does not continue its own generation prompt: a response "
                "is its text and %s instead.",
                tokenizer.name_or_path,
                end,
            )
        elif continued is not None:
            tail = continued.partition(probe)[2]
            found = re.search("|".join(map(re.escape, self._special)), tail)
            if found and not tail[: found.start()].strip():
                self.closing = tail[: found.end()]
        name = "probe_of_tool_calls"
        calls = self._continuation(_calling([{"name": name, "arguments": {"x": "1"}}]))
        self.calls_by_template = self._continues and calls is not None and name in calls
        if tools and not self.calls_by_template:
            log.warning(
                "The chat template of %s has no form for tool calls: they are written as "
                "<TOOLCALL>[…]</TOOLCALL>, in training and in evaluation alike.",
                tokenizer.name_or_path,
            )

    @property
    def end_ids(self) -> list[int]:
        """Token ids at which a generated answer stops."""
        last: int = self.tokenizer(self.closing, add_special_tokens=False).input_ids[-1]
        end = self.tokenizer.eos_token_id
        assert isinstance(end, int)
        return sorted({end, last})

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message], where: str) -> str:
        """The text up to where the assistant begins to speak.

        Raises:
            DataError: the template refuses the conversation.
        """
        return self._render(messages, tools, where, add_generation_prompt=True)

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
            DataError: the template refuses the answer, or does not begin with the prompt.
        """
        if not isinstance(answer, str) and not self.calls_by_template:
            answer = calls_as_text(answer)
        if not self._continues:
            assert isinstance(answer, str)
            return answer + self.closing
        turn = {"role": "assistant", "content": answer}
        if not isinstance(answer, str):
            turn = _calling(answer)
        whole = self._render([*messages, turn], tools, where, add_generation_prompt=False)
        if not whole.startswith(prompt):
            raise DataError(
                f"{where}: with the answer, the chat template renders the conversation before it "
                "differently, so the prompt is no prefix of the whole. Change the template, or "
                "take out the record."
            )
        text = whole[len(prompt) :]
        place = text.rfind(self.closing)
        if place >= 0:
            return text[: place + len(self.closing)]
        text = text.rstrip()
        return text if text.endswith(tuple(self._special)) else text + self.closing

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
                answers.append(ids[seam:] if ids[:seam] == prompt else self._ids([text])[0])
            found.append((prompt, answers))
        return found

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        ids: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False).input_ids
        return ids

    def _continuation(self, turn: Message) -> str | None:
        """What the template puts behind its generation prompt for this turn; None if it cannot."""
        ask = [{"role": "user", "content": "Hello"}]
        try:
            prompt = self._render(ask, [], "probe", add_generation_prompt=True)
            whole = self._render([*ask, turn], [], "probe", add_generation_prompt=False)
        except DataError:
            return None
        return whole[len(prompt) :] if whole.startswith(prompt) else None

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        where: str,
        add_generation_prompt: bool,
    ) -> str:
        listed = [_wrapped(tool) for tool in tools] or None
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=listed,
                chat_template=with_fixed_date(self.tokenizer.get_chat_template(tools=listed)),
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
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


def cut_left(ids: list[int], limit: int, bos: int | None) -> list[int]:
    """The last ``limit`` tokens of a prompt; a token that only begins it is kept in front."""
    if len(ids) <= limit:
        return ids
    if limit > 1 and ids[0] == bos and bos not in ids[1:]:
        return [ids[0], *ids[len(ids) - limit + 1 :]]
    return ids[len(ids) - limit :]


def calls_as_text(calls: Sequence[Message]) -> str:
    """Tool calls for a template that has no form for them."""
    return f"<TOOLCALL>{json.dumps(list(calls), ensure_ascii=False)}</TOOLCALL>"


def _calling(calls: Sequence[Message]) -> dict[str, Any]:
    """The assistant's turn with tool calls, in the form that chat templates read."""
    listed = [
        # Nine letters and digits: the only identifiers that Mistral's template takes.
        {"type": "function", "id": f"call{place:05d}", "function": dict(call)}
        for place, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": listed}


def _wrapped(tool: Message) -> dict[str, Any]:
    """A tool in the form that chat templates read."""
    if tool.get("type") == "function" and isinstance(tool.get("function"), Mapping):
        return dict(tool)
    return {"type": "function", "function": dict(tool)}
