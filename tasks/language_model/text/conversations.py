"""From a conversation and an answer to the token ids of a prompt and a response.

Everything is rendered by the tokenizer's own chat template:

    prompt     messages, the tools with them, up to where the answer begins
    response   what the template writes for the answer, up to and with the token that ends the turn

so that the prompt's tokens are a prefix of the whole's, and the response is what the model itself
would have to generate.

Where the answer begins is seen on a probe that answers the same conversation: what the template
writes in front of it (a *scaffold*: an empty thought as ``<think></think>``, a channel's name)
belongs to the prompt. With tools, a probe that calls is beside it, and the prompt is what both
share, so that the choice between them stays in the response. The prompt of an answer with a thought
of its own is the generation prompt alone.

Templates leave out what they have no place for, in silence. So every text that is given is looked
for in what was rendered, and a record of which one is missing is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import chain, product
from os.path import commonprefix
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.harmless import texts_in
from pl_pointwise.tasks.common.records import shown

from .messages import Message, Parts, parts_of
from .reasoning import THOUGHTS, Marks, empty_thought, final_answer, split_thought
from .records import Record
from .template_source import arguments_of, marks_in, opened_by
from .tool_results import in_order_of_calls, with_made_ids

DATE = datetime(2024, 7, 26)
"""The date that a template gets as today's, or a run could not be repeated tomorrow."""
_TODAY = r"strftime_now\(\s*(['\"])(.*?)\1\s*\)"

_PROBE, _VALUE, _SECOND = (
    Parts("probe of an answer"),
    "probe of an argument",
    "second_probe",
)
_CALL: dict[str, Any] = {"name": "probe_of_tool_calls", "arguments": {"x": _VALUE}}
_THOUGHT = "probe of a thought"
_ID_FORMS = ("call{place:05d}", "functions.{name}:{place}")
"""Of calls without one. Mistral's takes nine letters and digits alone; Kimi-K2's id is the name."""

_MARK = r"(?:<[^<>\s]+>|\[[^\[\]\s]+\]|◁[^◁▷\s]+▷)"
_LAST_MARK, _FIRST_MARK = re.compile(_MARK + r"[^<>\[\]◁▷]{0,20}$"), re.compile(_MARK)
_CHANNEL_MARK = "<|channel|>"
_READY = re.compile(
    r"(\[/INST\]|<\|assistant\|>|###? ?(Response|Assistant|Output):|\n\s*Assistant:|\sASSISTANT:"
    r"|<[^<>\s]+>(assistant|model)(<[^<>\s]+>)?)\s*$"
)
"""What the prompts of other models' formats end in."""
# Not <|begin_of_thought|> and <|end_of_solution|>, which some data sets have in texts.
_TOKEN = r"<\|(?!\w*(?:think|thought|reason|solution))\w+\|>|<(?:start|end)_of_turn>|<｜[^｜\s]+｜>"
_FOREIGN = re.compile(
    rf"^\s*({_TOKEN}|<bos>|<s>(?!.*</s>))|({_TOKEN}|<eos>|</s>)\s*$", re.DOTALL
)
"""A mark of turns, also of another model, at the start or end of a text."""

_ASK = Record([{"role": "user", "content": "Hello"}], [], (), "probe")


class ConversationEncoder:
    """Renders prompts and responses by a tokenizer's chat template, and tokenises them.

    Args:
        tokenizer: with a chat template and an end token.
        template_arguments: the template's other arguments, such as {"enable_thinking": False}.

    Attributes:
        closing: what ends an assistant's turn, the end token included.
        thoughts: what begins and what ends a thought: as the template writes one, then as its
            source says, then as other models do.

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
        name = tokenizer.name_or_path or type(tokenizer).__name__
        end = tokenizer.eos_token
        for part, value in {
            "end token": end,
            "chat template": tokenizer.chat_template,
        }.items():
            if not value:
                remedy = "Take the instruction-tuned model's, or set it"
                raise DataError(f"The tokenizer {name} has no {part}. {remedy}.")
        assert isinstance(end, str)
        added = tokenizer.added_tokens_decoder.values()
        self._tokens = _any_of([end, *(token.content for token in added)])
        source = _whole_source(tokenizer)
        self._arguments = arguments_of(source)
        self._check_arguments()
        self.thoughts: Marks = [*dict.fromkeys([*marks_in(source), *THOUGHTS])]
        self._in_history = any(end in source for _, end in self.thoughts)
        self._splits = False  # Whether the template takes thoughts out of texts.
        self._writes_thoughts = False  # Whether it has a place for them.
        # The marks of a thought in a text, else.
        self._as_text: tuple[str, str] | None = None
        # Those that it leaves out with it.
        self._left_out: tuple[str, str] | None = None
        self._calls_a_turn = math.inf
        self._arguments_as_text = False
        self._why_no_calls = ""
        self._id_form = _ID_FORMS[0]
        self._marks: re.Pattern[str] | None = None
        try:
            self.texts(_ASK)
        except DataError as error:
            raise DataError(
                f"The chat template of {name} does not continue its own generation prompt with an "
                f"answer.{self._hint} Take another in chat_template. ({error})"
            ) from error
        # The token behind a text closes its turn, or those behind it up to the end token.
        special = _any_of([end, *(token.content for token in added if token.special)])
        tail = self._render(_ASK, _PROBE).rpartition(_PROBE.text)[2]
        last = re.escape(end)
        # Kimi-K3 closes two elements; where its end token is another, up to the last of the marks.
        without = rf"(?:{special})(?:\S*(?:{special}))?" if end not in tail else special
        near = re.match(rf"\s*({last}|(?:{special})\S*?{last}|{without})", tail)
        self.closing = near[0] if near else end
        self._behind_text = (tail if near else None, self.closing)
        self._behind_call = self._behind_text  # Until a call was probed.
        self._ends = [end, re.findall(special, self.closing)[-1]]
        self._probe_thoughts(marks_in(source))
        self._probe_calls(special)
        self._marks = _marks_of_turns(self._render(_ASK), end, added, self.thoughts)

    def _check_arguments(self) -> None:
        """Refuses arguments that the template does not have, and truth values in quotes."""
        known = self._arguments
        self._hint = ""
        if known:
            self._hint = (
                f" The template's own arguments are: {', '.join(sorted(known))}."
            )
        for name, value in self.template_arguments.items():
            if known is not None and name not in known:
                raise DataError(
                    f"template_arguments: the chat template has no {name}."
                    f"{self._hint or ' It has none.'}"
                )
            if isinstance(value, str) and value.lower() in ("true", "false"):
                raise DataError(
                    f"template_arguments: {name} is the text {value!r}, which every template takes "
                    f"for true. Write {name}: {value.lower()} without quotes."
                )

    def answer_in(self, text: str) -> str:
        """A generated text without its thoughts and what the template writes around an answer."""
        answer = final_answer(text, self.thoughts)
        for head in self._answer_heads:
            answer = _without_head(answer, head)
        return answer.removesuffix(
            self.closing[: self.closing.rfind(self._ends[1])] or "\0"
        )

    def _probe_thoughts(self, in_source: Marks) -> None:
        """Finds whether the template writes thoughts, and between which marks."""
        base = self._render(_ASK)
        plain = self._render(_ASK, _PROBE).rpartition(_PROBE.text)[0]
        self._answer_heads = (
            [plain.removeprefix(base)] if plain.startswith(base) else []
        )
        opened = opened_by(base)
        self.thoughts = [*dict.fromkeys([*opened, *self.thoughts])]
        written = ""
        with suppress(DataError):
            written = self._render(_ASK, replace(_PROBE, reasoning=_THOUGHT))
        if _THOUGHT in written:
            self._writes_thoughts = True
            marks = _marks_around(written, base, self.closing)
            behind = written.partition(_THOUGHT)[2].partition(_PROBE.text)[0].strip()
            self._answer_heads += [
                behind.removeprefix(end).lstrip() for _, end in marks
            ]
            self.thoughts = [*dict.fromkeys([*marks, *self.thoughts])]
            self._splits = True
            return
        self._splits = bool(empty_thought(base, self.thoughts)[1])
        if self._splits:
            return
        # A template without a place for thoughts may keep one that stands in the text,
        for begin, end in in_source:
            text = f"{begin}\n{_THOUGHT}\n{end}\n\n{_PROBE.text}"
            with suppress(DataError):
                whole = self._render(_ASK, Parts(text))
                # Within Command A's response marks it would be no thought.
                behind = self._without_empty(whole.removeprefix(base))
                closed = base.rstrip().endswith(end)
                if whole.startswith(base) and behind.startswith(text) and not closed:
                    self._as_text = begin, end
                    return
        # or take it out of the text in silence.
        for begin, end in in_source:
            text = f"{begin}\n{_THOUGHT}\n{end}\n\n{_PROBE.text}"
            with suppress(DataError):
                if self._render(_ASK, Parts(text), whole=False).startswith(
                    base + _PROBE.text
                ):
                    self._splits = True
                    self._left_out = (begin, end)
                    return

    def _without_empty(self, text: str) -> str:
        """A text without the empty thought that it begins with: Kimi-K2-Thinking's."""
        for begin, end in self.thoughts:
            empty = re.match(rf"\s*{re.escape(begin)}\s*{re.escape(end)}\s*", text)
            if empty is not None:
                return text[empty.end() :]
        return text

    def _probe_calls(self, special: str) -> None:
        """Finds how the template writes tool calls, if it does: arguments as an object, or text."""
        written = ""
        why = "it leaves them out"
        for self._id_form, self._arguments_as_text in product(_ID_FORMS, (False, True)):
            try:
                written = self._render(_ASK, Parts(calls=[_CALL]))
            except DataError as error:
                why = str(error)
            if _VALUE in written and _CALL["name"] in written:
                break
        else:
            self._calls_a_turn = 0
            self._why_no_calls = why
            return
        tail = written.rpartition(_VALUE)[2]
        self._behind_call = (None, self.closing)
        marks = re.findall(special, tail)
        if marks:
            end = next((end for end in self._ends if end in marks), marks[-1])
            self._behind_call = (tail[tail.index(end) :], end)
        with suppress(DataError):
            both = Parts(calls=[_CALL, {**_CALL, "name": _SECOND}])
            if _SECOND not in self._render(_ASK, both):
                self._calls_a_turn = 1

    @property
    def end_ids(self) -> list[int]:
        """Token ids at which a generated answer stops."""
        closings = self._ids([self.closing, self._behind_call[1]])
        return sorted({self.tokenizer.eos_token_id, *(ids[-1] for ids in closings)})

    def texts(self, record: Record) -> tuple[str, list[str]]:
        """The prompt, and the text of each answer behind it with what ends the turn."""
        record = replace(
            record, messages=in_order_of_calls(record.messages, record.where)
        )
        self._check_marks(record)
        bare = with_made_ids(record.messages)
        if bare == record.messages:
            return self._texts(record)
        try:
            return self._texts(record)
        except DataError:
            # Mistral's template refuses most ids, and to Kimi-K2's the id is a name.
            return self._texts(replace(record, messages=bare))

    def _texts(self, record: Record) -> tuple[str, list[str]]:
        render = partial(self._render, record)
        originals = [*map(parts_of, record.answers)]
        base = render()
        every = []
        thinks = False  # Whether an answer has a thought.
        for original in originals:
            parts, thought = self._with_thought_in_place(original, render, base)
            every.append(parts)
            thinks |= thought
        if thinks:
            prompt = base
            head = base
        else:
            head = render(_PROBE).rpartition(_PROBE.text)[0]
            if self._calls_a_turn and (
                record.tools or any(parts.calls for parts in every)
            ):
                head = self._before_calls(head, render(Parts(calls=[_CALL])), base)
            prompt, head = self._prompt(base, head, record)
        closed = prompt.rstrip().endswith(tuple(end for _, end in self.thoughts))
        responses = []
        for parts, original in zip(every, originals, strict=True):
            if closed and split_thought(parts.text, self.thoughts)[0]:
                raise self._differs(record.where)
            whole = render(parts)
            if thinks and not self._writes_thoughts:
                whole = self._as_given(render, prompt, original) or whole
            text = self._behind(prompt, (head, base), whole, parts, record.where)
            if split_thought(parts.text, self.thoughts)[0]:
                text = self._without_empty(text)
            if parts.reasoning and self._left_out and parts.reasoning not in text:
                text = _as_one_text(replace(parts, text=text), self._left_out).text
            responses.append(self._response(parts, text, record.where, thinks))
        if thinks and self._opens(prompt):
            self._check_closed(every, responses, record.where)
        return prompt, responses

    def _with_thought_in_place(
        self, parts: Parts, render: Callable[..., str], base: str
    ) -> tuple[Parts, bool]:
        """An answer with its thought where the template reads it; whether it has one."""
        if parts.reasoning:
            # Kimi-K2-Thinking has a place for it in some turns.
            if (
                self._as_text
                and parts.reasoning.strip() not in render(parts)[len(base) :]
            ):
                parts = _as_one_text(parts, self._as_text)
            return parts, True
        if not (self._splits or self._in_history):
            return parts, False
        # It may stand in the text.
        thought, text = split_thought(parts.text, self.thoughts)
        split = Parts(text, parts.calls, thought)
        if self._splits:
            parts = split
        elif thought and self._as_text and not parts.text.startswith(self._as_text[0]):
            parts = _as_one_text(split, self._as_text)
        return parts, bool(thought)

    def _as_given(self, render: Any, prompt: str, original: Parts) -> str:
        """What the template writes for an answer whose text begins with the thought that the prompt
        begins, if that goes on from the prompt word for word (OLMo-3's); else "".
        """
        begin = empty_thought(prompt, self.thoughts)[0].strip()
        if not begin or not original.text.lstrip().startswith(begin):
            return ""
        with suppress(DataError):
            whole: str = render(original)
            behind = original.text.lstrip().removeprefix(begin).lstrip()
            if whole.startswith(prompt) and whole[len(prompt) :].lstrip().startswith(
                behind
            ):
                return whole
        return ""

    def _opens(self, prompt: str) -> bool:
        """Whether a prompt ends in a thought that has yet to be closed."""
        return bool(empty_thought(prompt, self.thoughts)[1])

    def _check_closed(
        self, every: Sequence[Parts], texts: Sequence[str], where: str
    ) -> None:
        """Behind a prompt that begins a thought every response has to end one."""
        for parts, text in zip(every, texts, strict=True):
            if not any(end in text for _, end in self.thoughts):
                raise DataError(
                    f"{where}: the prompt ends within a thought, and the answer "
                    f"{shown(parts.text)} would be part of it. Give it a thought too, or a record "
                    f"of its own.{self._hint}"
                )

    def _check_marks(self, record: Record) -> None:
        """Refuses a text in which the model's own marks of turns stand: it is rendered already."""
        for turn in record.messages:
            calls = [call["function"] for call in turn.get("tool_calls") or ()]
            whose = f"a turn of role {turn['role']}"
            for text in texts_in(
                [turn["content"], turn.get("reasoning_content"), calls]
            ):
                self._check_text(text, record.where, whose)
        for text in texts_in(record.tools):
            self._check_text(text, record.where, "a tool")
        last = record.messages[-1]
        ready = _READY.search(last["content"]) if last["role"] == "user" else None
        if ready is not None:
            raise DataError(
                f"{record.where}: the prompt ends in {shown(ready[0].strip())}, as one in the form "
                "of a chat template does. Give the plain text, or messages."
            )
        for parts in map(parts_of, record.answers):
            for text in texts_in([parts.text, parts.reasoning, parts.calls]):
                self._check_text(text, record.where, "the answer")

    def _check_text(self, text: str, where: str, what: str) -> None:
        if self._marks is None:
            return
        of_model = self._marks.search(text)
        if of_model is not None:
            if of_model[0] in self._ends and what == "the answer":
                return  # It has a message of its own.
            raise DataError(
                f"{where}: {what} holds {of_model[0]}, a mark of the model's tokenizer or chat "
                "template. Give the plain text, or messages."
            )
        mark = _foreign_mark(text, self.thoughts)
        if mark:
            raise DataError(
                f"{where}: {what} begins or ends with {mark}, a mark of another model's turns. "
                "Give the plain text, or messages."
            )

    def _before_calls(self, head: str, called: str, base: str) -> str:
        """What a text's ``head`` shares with a call, tokens kept whole."""
        place = len(commonprefix([head, called]))  # noqa: RUF071  (of texts, not of paths)
        marks = list(chain.from_iterable(self.thoughts))
        for token in re.finditer(f"{self._tokens}|{_any_of(marks)}", head):
            if token.start() < place < token.end():
                place = token.start()
                break
        # DeepSeek's calls do not go on from a tool's result.
        stem = base.removesuffix(empty_thought(base, self.thoughts)[0])
        return head[:place] if place >= len(commonprefix([head, stem])) else head  # noqa: RUF071

    def _response(self, parts: Parts, text: str, where: str, thinks: bool) -> str:
        """What the template writes behind a prompt, from there to what ends the turn."""
        tail, closing = self._behind_call if parts.calls else self._behind_text
        text = text.rstrip() if tail is None else text.removesuffix(tail)
        _must_hold(parts.reasoning, text, where, "the thought of an answer", self._hint)
        _must_hold(parts.text, text, where, "the text of an answer")
        for call in parts.calls:
            for word in (call["name"], *call["arguments"]):
                _must_hold(word, text, where, "a tool call of an answer")
        self._check_thoughts(parts, text, where, thinks)
        # GigaChat puts its other one before a call.
        ends = self._ends[: 1 if parts.calls else 2]
        for end in ends:
            if end in text:
                raise DataError(
                    f"{where}: the answer holds {end}, at which the model's answers end. Take it "
                    "out."
                )
        return text + closing

    def _check_thoughts(
        self, parts: Parts, text: str, where: str, thinks: bool
    ) -> None:
        """Refuses a mark of a thought that the template put into an answer, or read in its text.

        thinks: whether an answer of the record has a thought; then each may have an empty one.
        """
        if parts.calls:  # Command A writes an empty thought in front of them.
            return
        of_answer = parts.text + parts.reasoning
        for mark in set(chain.from_iterable(self.thoughts)):
            changed = mark in parts.text and parts.text.strip() not in text
            may_be_empty = thinks and not split_thought(parts.text, self.thoughts)[0]
            if changed or text.count(mark) > of_answer.count(mark) + may_be_empty:
                raise DataError(
                    f"{where}: the chat template takes {mark} in the text of the answer for a mark "
                    "of a thought, or adds one. Take it out of the text, or take another template "
                    f"in chat_template.{self._hint}"
                )

    def characters(self, response: str) -> int:
        """Characters of a response, without what ends the turn."""
        closings = [self.closing, self._behind_call[1]]
        lengths = [len(closing) for closing in closings if response.endswith(closing)]
        return len(response) - max(lengths)

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
            if calls:
                waiting = []
                for call in calls:
                    waiting.append(
                        (call.get("id", call.get("named")), self._call(call, known))
                    )
                    known += 1
                turn["tool_calls"] = [call for _, call in waiting]
            turns.append(turn)
        return turns

    def _call(self, call: Mapping[str, Any], number: int) -> dict[str, Any]:
        """A call as the template reads it, with an id, made of its number if it has none."""
        function = call["function"]
        if self._arguments_as_text:
            text = json.dumps(function["arguments"], ensure_ascii=False)
            function = {**function, "arguments": text}
        made = self._id_form.format(place=number, name=function["name"])
        return {"type": "function", "id": call.get("id", made), "function": function}

    def _render(
        self, record: Record, answer: Parts | None = None, whole: bool = True
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
        listed = [_as_listed(tool) for tool in record.tools]
        try:
            template = self.tokenizer.get_chat_template(tools=listed or None)
            text = self.tokenizer.apply_chat_template(
                turns,
                tools=listed or None,
                chat_template=re.sub(
                    _TODAY, lambda found: repr(DATE.strftime(found[2])), template
                ),
                add_generation_prompt=answer is None,
                tokenize=False,
                **self.template_arguments,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise DataError(
                f"{where}: the chat template refuses this conversation ({error}). Change the "
                "record to what the model's format allows, or take it out."
            ) from error
        assert isinstance(text, str)
        if answer is not None:
            if whole:
                _must_hold(answer.text, text, where, "the text of an answer")
            return text
        for tool in listed:
            _must_hold(tool["function"]["name"], text, where, "a tool")
        for turn in turns:
            self._must_hold_turn(turn, text, where)
        return text

    def _check_number_of_calls(
        self, turns: Sequence[Mapping[str, Any]], where: str
    ) -> None:
        """Refuses turns with more tool calls than the template writes."""
        most = max(len(turn.get("tool_calls") or ()) for turn in turns)
        if most and not self._calls_a_turn:
            raise DataError(
                f"{where}: the chat template has no form for tool calls ({self._why_no_calls}). "
                "Take another in chat_template, or take the record out."
            )
        if most > self._calls_a_turn:
            raise DataError(
                f"{where}: the chat template takes at most {self._calls_a_turn} tool calls a turn "
                f"(here: {most}). Take another in chat_template, give each call its own turn, "
                "followed by its result, or take the record out."
            )

    def _must_hold_turn(self, turn: Mapping[str, Any], text: str, where: str) -> None:
        """Refuses a turn of which the template left something out of the text."""
        content = turn["content"]
        # Templates drop the thoughts of earlier answers.
        if turn["role"] == "assistant" and self._in_history:
            content = split_thought(content, self.thoughts)[1]
        _must_hold(content, text, where, f"a turn of role {turn['role']}")
        for call in turn.get("tool_calls") or ():
            name = call["function"]["name"]
            _must_hold(name, text, where, "a tool call of an earlier turn")

    def _prompt(self, base: str, head: str, record: Record) -> tuple[str, str]:
        """(prompt, what stands in its place in front of an answer).

        base: the conversation up to where the assistant begins.
        head: what the template writes in front of a text, the scaffold included.
        """
        thought, closing = empty_thought(base, self.thoughts)
        stem = base.removesuffix(thought)
        front = head  # With the conversation as it is without an answer.
        last = record.messages[-1]["content"].strip()
        # Mistral's: a system turn is in the last user's
        if last and not head.startswith(stem):
            before, in_base, _ = base.rpartition(last)
            _, in_head, behind = head.rpartition(last)
            front = before + last + behind if in_base and in_head else ""
        # A blank at its end stays in the response: tokenizers join it
        if front.startswith(base):
            prompt = base + front[len(base) :].rstrip(" \t")  # to the word behind it.
            place = len(head) - len(front) + len(prompt)
            # Nemotron-Nano-v2 writes an answer right behind the thought that the prompt begins.
            return prompt + empty_thought(prompt, self.thoughts)[1], head[:place]
        if front == stem:  # Gemma 4's closed thought, DeepSeek's open one
            return base + closing, head
        # The template's own empty thought: Nemotron 3.
        if closing and front.startswith(stem):
            return front, head
        raise self._differs(record.where)

    def _behind(
        self, prompt: str, heads: tuple[str, str], whole: str, parts: Parts, where: str
    ) -> str:
        """What the whole has behind the prompt or a head, a thought that it leaves out put back."""
        head, base = heads
        thought, closing = empty_thought(prompt, self.thoughts)
        begun = empty_thought(base, self.thoughts)[1]
        fronts = (prompt, base, head) if begun else (prompt, head)
        for front in fronts:
            if whole.startswith(front):
                rest = whole[len(front) :]
                if parts.reasoning:
                    written = parts.reasoning.strip() in rest
                else:
                    written = any(end in rest for _, end in self.thoughts)
                if not closing or written:
                    return rest
                if any(rest.lstrip().startswith(end) for _, end in self.thoughts):
                    # Kimi-K2.5 closes a thought that it leaves out.
                    return parts.reasoning + rest
                return _closed_thought(parts.reasoning, closing) + rest.lstrip("\n")
        stem = prompt.removesuffix(thought)
        if not (closing and whole.startswith(stem)):
            raise self._differs(where)
        # An answer of this record thinks.
        rest = whole[len(stem) :].removeprefix(thought.rstrip())
        written = len(stem) + len(rest) < len(whole) or rest.startswith(closing.strip())
        return (
            rest.lstrip("\n")
            if written
            else _closed_thought(parts.reasoning, closing) + rest
        )

    def _differs(self, where: str) -> DataError:
        settings = []
        for name, value in self.template_arguments.items():
            settings.append(f"{name}={json.dumps(value)}")
        return DataError(
            f"{where}: with the answer, the chat template renders the conversation before it "
            "differently. Take another in chat_template, or take out the record; for a thought, or "
            "its marks in a text, there is no room with "
            f"{', '.join(settings) or 'its defaults'}."
            f"{self._hint}"
        )

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
        return (
            self.tokenizer(list(texts), add_special_tokens=False).input_ids
            if texts
            else []
        )


def _reply(answer: Parts) -> dict[str, Any]:
    """The assistant's message that an answer is, as templates take it."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.calls:
        message["tool_calls"] = [{"function": call} for call in answer.calls]
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    return message


def _without_head(answer: str, head: str) -> str:
    """An answer without what the template writes in front of one, or the end of that."""
    for place in range(len(head)):
        rest = head[place:]
        if re.search(_MARK, rest) and answer.startswith(rest):
            return answer.removeprefix(rest)
    return answer


def _foreign_mark(text: str, thoughts: Marks) -> str:
    """The mark of turns that a text begins or ends with; "" if there is none.

    <s>…</s> is a text that HTML strikes out.
    """
    foreign = _FOREIGN.search(text)
    mark = (foreign[1] or foreign[2]).strip() if foreign else ""
    struck = mark == "</s>" and "<s>" in text
    return "" if struck or any(mark in pair for pair in thoughts) else mark


def _whole_source(tokenizer: PreTrainedTokenizerBase) -> str:
    """The template, of several (one for tools) all."""
    template: Any = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else str(template)


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


def _as_one_text(parts: Parts, marks: tuple[str, str]) -> Parts:
    """An answer with its thought in the text, as a template without a place for one has it."""
    begin, end = marks
    return Parts(f"{begin}\n{parts.reasoning}\n{end}\n\n{parts.text}", parts.calls)


def _closed_thought(thought: str, closing: str) -> str:
    """A thought behind what begins it, and its end on a line of its own, as of an empty one.

    closing: what closes an empty thought: a line more where what begins it does not end its line.
    """
    if not thought:
        return closing
    end = closing.lstrip("\n")
    lines = len(closing) - len(end)
    return "\n" * (lines - 1) + thought + "\n" * min(lines, 1) + end


def _marks_around(written: str, base: str, closing: str) -> list[tuple[str, str]]:
    """What a template wrote before and behind the probe of a thought."""
    before, _, rest = written.partition(_THOUGHT)
    after = rest.partition(_PROBE.text)[0].strip()
    last = _LAST_MARK.search(before.rstrip())
    begin = last[0] if last else ""
    # gpt-oss, whose channels reasoning.py knows
    if _CHANNEL_MARK in before or not after:
        return []
    if begin in base and not re.search("think|thought|reason", begin, re.IGNORECASE):
        begin = before[len(commonprefix([before, base])) :].strip()  # noqa: RUF071  (of texts)
    first = _FIRST_MARK.match(after)
    # What begins an answer is no part of it, unless the same mark ends a turn as well.
    end = first[0] if first and first[0] not in closing else after
    return [(begin, end)] if begin else []


def _marks_of_turns(
    base: str, end: str, added: Iterable[Any], thoughts: Marks
) -> re.Pattern[str] | None:
    """Matches tokens that no text may hold: special ones, and those with which turns are marked."""
    names = {end}
    for token in added:
        if token.special or token.content in base:
            names.add(token.content)
    names -= set(chain.from_iterable(thoughts))
    marks = sorted(name for name in names if name.strip())
    return re.compile(_any_of(marks)) if marks else None


def _any_of(tokens: Sequence[str]) -> str:
    """A pattern of these tokens, of two that begin alike the longer one."""
    return "|".join(map(re.escape, sorted(set(tokens), key=len, reverse=True)))


def _as_listed(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in the form that chat templates take."""
    if "function" in tool:
        return dict(tool)
    return {"type": "function", "function": dict(tool)}


def _must_hold(text: str, rendered: str, where: str, what: str, hint: str = "") -> None:
    """Refuses a record of which a text is not in what the template made, as it is or as JSON."""
    if text.strip() in rendered:
        return
    forms = [text]
    for ensure_ascii in (False, True):
        forms.append(json.dumps(text, ensure_ascii=ensure_ascii)[1:-1])
    whole = "".join(rendered.split())  # Falcon's joins paragraphs.
    if not any("".join(form.split()) in whole for form in forms):
        raise DataError(
            f"{where}: the chat template leaves out {what}, or changes it: {shown(text)}. Change "
            "the record to what the model's format has, or take it out, or take another template "
            f"in chat_template.{hint}"
        )
