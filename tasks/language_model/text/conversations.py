"""From a conversation and an answer to the token ids of a prompt and a response.

Everything is rendered by the tokenizer's own chat template:

    prompt     messages, the tools with them, up to where the answer begins
    response   what the template writes for the answer, up to and with the token that ends the turn

so that the prompt's tokens are a prefix of the whole's, and the response is what the model itself
would have to generate. Each step has a file of its own:

    turn_marks.py                       texts that hold marks of turns are refused
    template_traits.py, _families.py    what the template is asked, once
    rendering.py                        what it writes, and that it leaves nothing out
    thought_places.py                   the thought of an answer, where the template reads it
    seam.py                             where the prompt ends and the response begins

Where the answer begins is seen on a probe that answers the same conversation. With tools, a probe
that calls is beside it. The prompt of an answer with a thought of its own is the generation prompt
alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from pl_pointwise.errors import DataError

from .messages import Parts, parts_of
from .reasoning import Marks, final_answer, split_thought
from .records import Record
from .rendering import DATE as DATE
from .rendering import ChatTemplate, must_hold
from .seam import before_calls, behind_prompt, prompt_and_head
from .template_families import MARK, PROBE, PROBE_CALL
from .template_traits import traits_of
from .thought_places import (
    check_closed,
    check_marks_of_thoughts,
    whole_as_given,
    with_thought_in_place,
    with_thought_put_back,
)
from .tool_results import in_order_of_calls, with_made_ids


class ConversationEncoder:
    """Renders prompts and responses by a tokenizer's chat template, and tokenises them.

    Args:
        tokenizer: with a chat template and an end token.
        template_arguments: the template's other arguments, such as {"enable_thinking": False}.

    Attributes:
        traits: what the template was asked.

    Raises:
        DataError: no end token, no template, an argument that is not in the template, or a
            template that does not continue its own generation prompt.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template_arguments = dict(template_arguments or {})
        self.traits = traits_of(ChatTemplate.of(tokenizer, self.template_arguments))

    @property
    def closing(self) -> str:
        """What ends an assistant's turn, the end token included."""
        return self.traits.behind_text.closing

    @property
    def thoughts(self) -> Marks:
        """What begins and what ends a thought: as the template writes one, then as its source says,
        then as other models do.
        """
        return self.traits.thoughts

    @property
    def end_ids(self) -> list[int]:
        """Token ids at which a generated answer stops."""
        closings = self._ids(self.traits.closings)
        return sorted({self.tokenizer.eos_token_id, *(ids[-1] for ids in closings)})

    # Texts ----------------------------------------------------------------------------------------

    def texts(self, record: Record) -> tuple[str, list[str]]:
        """The prompt, and the text of each answer behind it with what ends the turn."""
        record = replace(
            record, messages=in_order_of_calls(record.messages, record.where)
        )
        self.traits.turn_marks.check(record)
        bare = with_made_ids(record.messages)
        if bare == record.messages:
            return self._texts(record)
        try:
            return self._texts(record)
        except DataError:
            # Mistral's template refuses most ids, and to Kimi-K2's the id is a name.
            return self._texts(replace(record, messages=bare))

    def _texts(self, record: Record) -> tuple[str, list[str]]:
        template = self.traits.template
        base = template.render(record)
        answers: list[
            tuple[Parts, Parts]
        ] = []  # As the template reads it, and as given.
        thinks = False  # Whether an answer has a thought.
        for original in map(parts_of, record.answers):
            parts, thought = with_thought_in_place(self.traits, record, original, base)
            answers.append((parts, original))
            thinks |= thought
        read = [parts for parts, _ in answers]
        prompt, head = self._prompt(record, base, read, thinks=thinks)
        closed = prompt.rstrip().endswith(tuple(end for _, end in self.thoughts))
        responses = []
        for parts, original in answers:
            # DeepSeek-V4's prompt may end in a closed thought: no second one stands behind it.
            if closed and split_thought(parts.text, self.thoughts)[0]:
                raise template.differs(record.where)
            whole = template.render(record, parts)
            if thinks and not self.traits.thought_form.written:
                whole = whole_as_given(self.traits, record, prompt, original) or whole
            text = behind_prompt(
                template, prompt, (head, base), whole, parts, record.where
            )
            text = with_thought_put_back(self.traits, parts, text)
            responses.append(self._response(parts, text, record.where, thinks=thinks))
        if thinks:
            check_closed(self.traits, prompt, read, responses, record.where)
        return prompt, responses

    def _prompt(
        self, record: Record, base: str, answers: Sequence[Parts], *, thinks: bool
    ) -> tuple[str, str]:
        """(prompt, what stands in its place in front of an answer)."""
        # The thought is generated too: all behind the generation prompt is the response.
        if thinks:
            return base, base
        template = self.traits.template
        head = template.render(record, PROBE).rpartition(PROBE.text)[0]
        may_call = record.tools or any(parts.calls for parts in answers)
        if template.calls.at_most and may_call:
            called = template.render(record, Parts(calls=[PROBE_CALL]))
            head = before_calls(template, head, called, base)
        return prompt_and_head(template, record, base, head)

    def _response(self, parts: Parts, text: str, where: str, *, thinks: bool) -> str:
        """What the template writes behind a prompt, from there to what ends the turn."""
        traits = self.traits
        ending = traits.behind_call if parts.calls else traits.behind_text
        # Where the probe did not show it, blanks alone stand behind an answer.
        if ending.tail is None:
            text = text.rstrip()
        else:
            text = text.removesuffix(ending.tail)
        hint = traits.template.hint
        must_hold(parts.reasoning, text, where, "the thought of an answer", hint)
        must_hold(parts.text, text, where, "the text of an answer")
        for call in parts.calls:
            for word in (call["name"], *call["arguments"]):
                must_hold(word, text, where, "a tool call of an answer")
        check_marks_of_thoughts(traits, parts, text, where, thinks=thinks)
        # GigaChat puts its other one before a call.
        ends = traits.ends[: 1 if parts.calls else 2]
        for end in ends:
            if end in text:
                raise DataError(
                    f"{where}: the answer holds {end}, at which the model's answers end. Take it "
                    "out."
                )
        return text + ending.closing

    def characters(self, response: str) -> int:
        """Characters of a response, without what ends the turn."""
        lengths = [
            len(closing)
            for closing in self.traits.closings
            if response.endswith(closing)
        ]
        return len(response) - max(lengths)

    def answer_in(self, text: str) -> str:
        """A generated text without its thoughts and what the template writes around an answer."""
        answer = final_answer(text, self.thoughts)
        for head in self.traits.heads:
            answer = _without_head(answer, head)
        # Of a closing of several tokens generation stops at the last, and leaves the others.
        before_last = self.closing[: self.closing.rfind(self.traits.ends[1])]
        return answer.removesuffix(before_last) if before_last else answer

    # Tokens ---------------------------------------------------------------------------------------

    def encode(
        self, prompts: Sequence[str], responses: Sequence[Sequence[str]]
    ) -> list[tuple[list[int], list[list[int]]]]:
        """Token ids of each prompt and of each of its responses.

        What the whole has behind the prompt's; where a tokenizer joins the two, those alone.
        """
        whole = []
        for prompt, texts in zip(prompts, responses, strict=True):
            whole += [prompt + text for text in texts]
        ids = self._ids([*prompts, *whole])  # All at once: tokenizers are fast then.
        of_whole = iter(ids[len(prompts) :])
        encoded = []
        for prompt_ids, texts in zip(ids, responses, strict=False):
            behind = [
                self._behind_ids(prompt_ids, next(of_whole), text) for text in texts
            ]
            encoded.append((prompt_ids, behind))
        return encoded

    def _behind_ids(self, prompt: list[int], whole: list[int], text: str) -> list[int]:
        """The tokens of a response: those of the whole behind the prompt's, else its own."""
        seam = len(prompt)
        if whole[:seam] == prompt:
            return whole[seam:]
        # Within a line, as at its start some tokenizers put a blank in front.
        line, within, alone = self._ids(["\n", "\n" + text, text])
        return within[len(line) :] if within[: len(line)] == line else alone

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        # Of no text a tokenizer gives no list of no ids, but fails.
        if not texts:
            return []
        # The template writes what begins a sequence itself, and it would stand there twice.
        return self.tokenizer(list(texts), add_special_tokens=False).input_ids


def _without_head(answer: str, head: str) -> str:
    """An answer without what the template writes in front of one, or the end of that."""
    for place in range(len(head)):
        rest = head[place:]
        # Without a mark in it the end of a head may be the answer's own first word.
        if re.search(MARK, rest) and answer.startswith(rest):
            return answer.removeprefix(rest)
    return answer
