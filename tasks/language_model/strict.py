"""Strict tests of generated answers, where a likelihood only stands for what is asked.

A constraint on s̄ makes a response likely. Whether the model then writes one that works, a call of a
tool that is there with all it requires, is seen on an answer that it generates, and has no
gradient. With :class:`Strict` the multipliers and the reported violations follow such a test, and
the weights go on following s̄ (``strict_values`` of pl_pointwise/evaluation.py).

A test says of an answer whether it is of a kind: a valid tool call, a refusal, or what a function
of the user's says. It speaks for a response that is of that kind itself; for others s̄ stands. Where
such a response is to be likely (s̄ ≥ ε) the answer has to pass, where it is to be unlikely (s̄ ≤ ε)
it must not. In the units of s̄ the strict value is ε + margin of an answer that passes, ε − margin
of one that does not: a violation of ± margin.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from pl_pointwise import Constraint
from pl_pointwise.data import PADDING
from pl_pointwise.errors import TrainingError
from pl_pointwise.step import Measured, require_names

from .conversations import ConversationEncoder
from .messages import tool_calls
from .reasoning import final_answer
from .refusals import is_refusal

if TYPE_CHECKING:
    from .module import LanguageModelModule

Test = Literal["tool_call", "refusal"] | Callable[[str, Any], bool]

_ENTRY = "strict_values"
_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)  # Qwen, Hermes, MiniMind, SmolLM3
_PREFIXES = ("[TOOL_CALLS]", "<|python_tag|>", "<|tool_call|>")  # Mistral, Llama, Granite
_PROBE = {"name": "probe", "arguments": {"x": "1"}}


@dataclass
class Strict:
    """Which constraints are judged by generated answers.

    Args:
        tests: by constraint: "tool_call", the answer is nothing but valid calls of the record's
            tools; "refusal", by the keyword rule; or a function (answer, record) -> bool, in a
            configuration by its import path.
        every_n_epochs: a training sample is answered at its first visit and in every so many
            epochs; in between its last value stands. An evaluation always answers.
        margin: the size of a violation by a test, in the units of s̄.

    Raises:
        ValueError: a test that is none of these. A checkpoint holds no function, and a path in one
            is not imported: give the function again.
    """

    tests: dict[str, Test]
    every_n_epochs: int = 1
    margin: float = 1.0

    def __post_init__(self) -> None:
        for name, test in self.tests.items():
            if not callable(test) and test not in ("tool_call", "refusal"):
                raise ValueError(
                    f"judged_by.tests.{name}={test!r}: give tool_call, refusal, or a function "
                    "(answer, record) -> bool. An import path is taken from a configuration or the "
                    "command line alone: of a checkpoint nothing is imported."
                )
        if self.every_n_epochs < 1 or not 0 < self.margin < math.inf:
            raise ValueError(
                f"judged_by: every_n_epochs={self.every_n_epochs}, margin={self.margin}: give at "
                "least 1 epoch, and a margin above 0."
            )


# The tests ----------------------------------------------------------------------------------------


def calls_in(answer: str) -> list[dict[str, Any]] | None:
    """The tool calls that an answer consists of, [{"name", "arguments"}]; None of any other.

    Read are ``<tool_call>…</tool_call>``, ``<TOOLCALL>[…]</TOOLCALL>``, the JSON of one call or a
    list of them alone, and that behind the marks of Mistral, Llama and Granite; "parameters" is
    another name of "arguments".
    """
    text = final_answer(answer).strip()
    pieces = _BLOCK.findall(text)
    if pieces and _BLOCK.sub("", text).strip():
        return None
    for prefix in _PREFIXES:
        text = text.removeprefix(prefix)
    found: list[dict[str, Any]] = []
    for piece in pieces or [text]:
        if '"arguments"' not in piece:
            piece = piece.replace('"parameters"', '"arguments"', 1)
        try:
            calls = tool_calls(piece)
        except ValueError:
            return None
        if calls is None:
            return None
        found += calls
    return found


def names_of(answer: str) -> list[str]:
    """The functions that an answer calls, in order; none where it is no call."""
    return [call["name"] for call in calls_in(answer) or ()]


def calls_existing(answer: str, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an answer consists of calls of these tools."""
    called, known = names_of(answer), {_described(tool)["name"] for tool in tools}
    return bool(called) and known.issuperset(called)


def is_valid_call(answer: str, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether it consists of calls of these tools, each with all arguments its tool requires."""
    required = {_described(tool)["name"]: _required(_described(tool)) for tool in tools}
    return calls_existing(answer, tools) and all(
        required[call["name"]] <= set(call["arguments"]) for call in calls_in(answer) or ()
    )


def passes(test: Test, answer: str, record: Any) -> bool:
    """Whether an answer is of a test's kind; ``record`` has ``tools``."""
    if test == "tool_call":
        return is_valid_call(answer, record.tools)
    if test == "refusal":
        return is_refusal(answer)
    assert callable(test)
    return bool(test(answer, record))


def call_report(answer: str, preferred: Sequence[str], record: Any) -> dict[str, bool]:
    """What holds of an answer where a preferred response calls tools; {} where none does."""
    wanted = [names for text in preferred if (names := names_of(text))]
    if not wanted:
        return {}
    return {
        "valid_call": is_valid_call(answer, record.tools),
        "existing_tool": calls_existing(answer, record.tools),
        "right_tool": names_of(answer) in wanted,
    }


CALL_RATES = {
    "valid_calls": "valid_call",
    "existing_tool": "existing_tool",
    "right_tool": "right_tool",
}
"""Rates over the answers where a tool is to be called, and which entry of the report each is of."""


def _described(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = tool.get("function", tool)
    return found


def _required(tool: Mapping[str, Any]) -> set[str]:
    """The arguments that a tool's JSON schema requires."""
    schema = tool.get("parameters")
    names = schema.get("required") if isinstance(schema, Mapping) else None
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def check_readable(encoder: ConversationEncoder) -> None:
    """
    Raises:
        ValueError: the template writes tool calls in a form that :func:`calls_in` does not read.
    """
    ask = [{"role": "user", "content": "?"}]
    schema = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    tool = {"name": "probe", "description": "probe", "parameters": schema}
    tools = [{"type": "function", "function": tool}]
    prompt = encoder.prompt(ask, tools, "probe of tool calls", [[_PROBE]])
    written = encoder.response(ask, tools, [_PROBE], prompt, "probe of tool calls")
    (_, (ids,)) = encoder.encode([prompt], [[written]])[0]
    text = response_text(encoder, ids)
    if calls_in(text) != [_PROBE]:
        raise ValueError(
            f"judged_by.tests: the chat template of {encoder.tokenizer.name_or_path} writes a tool "
            f"call as {text!r}, which tool_call does not read. Give a function "
            "(answer, record) -> bool in its place."
        )


def response_text(encoder: ConversationEncoder, ids: Sequence[int]) -> str:
    """A response's token ids as the text that a generated answer would have."""
    ids, ends = list(ids), encoder.end_ids
    while ids and ids[-1] in ends:
        ids.pop()
    text = encoder.tokenizer.decode(ids, skip_special_tokens=False)
    assert isinstance(text, str)
    return final_answer(text)


# Strict values ------------------------------------------------------------------------------------


class StrictTests:
    """The strict values of a module's constraints, and the last ones of every training sample.

    Args:
        settings: which tests.
        constraints: of the module.

    Raises:
        ValueError: a name that is no constraint's.
    """

    def __init__(self, settings: Strict, constraints: Mapping[str, Constraint]) -> None:
        require_names("judged_by.tests", settings.tests, constraints)
        self.settings = settings
        self.last: dict[str, Tensor] = {}
        """By constraint (N, K): the violation at the last visit; NaN of none. Kept only where it
        will be used."""
        self._restored = self._readable = False
        self._latest: tuple[Tensor, dict[str, Tensor]] | None = None
        self._answers: dict[int, tuple[str, bool]] = {}

    def values(
        self,
        module: LanguageModelModule,
        batch: Mapping[str, Any],
        surrogates: Mapping[str, Tensor],
        responses: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """By constraint that has a test, shaped as ``surrogates``.

        responses: which response each value is of, (B,) or (B, K), −1 of none.

        Raises:
            TrainingError: answers are cut before a call that they should make could end.
        """
        if self._latest and self._latest[0] is batch["prompt_ids"] and not module.training:
            return self._latest[1]  # An evaluated batch is asked for twice.
        if "tool_call" in self.settings.tests.values() and not self._readable:
            check_readable(module.encoder)
            self._readable = True
        index, records = batch["index"].cpu(), batch["records"]
        speaks, known = dict[str, Tensor](), dict[str, Tensor]()
        for name, test in self.settings.tests.items():
            columns = responses[name].cpu().reshape(len(index), -1)
            speaks[name] = self._speaks_for(test, module.encoder, batch, columns)
            if test == "tool_call" and module.constraints[name].at_least is not None:
                _require_room(name, batch, columns, speaks[name], module.generation.max_new_tokens)
            known[name] = self._known(name, module, index, columns)
        ask = torch.zeros(len(index), dtype=torch.bool)
        for name, entries in speaks.items():
            ask |= (entries & known[name].isnan()).any(1)
        rows = ask.nonzero()[:, 0].tolist()
        self._answers = {}
        if rows:
            answers = module.generate(batch["prompt_ids"][rows], batch["prompt_lengths"][rows])
            self._answers = dict(
                zip(rows, zip(answers.texts, answers.cut, strict=True), strict=True)
            )
        texts = [self._answers[row][0] if row in rows else "" for row in range(len(index))]
        found = {}
        for name, test in self.settings.tests.items():
            bounds = module.constraints if module.training else module.evaluation_constraints
            bound, sign = _bound(bounds[name])
            passed = [
                row in rows and passes(test, texts[row], records[row]) for row in range(len(texts))
            ]
            new = bound + self.settings.margin * (2.0 * torch.tensor(passed).double()[:, None] - 1)
            value = torch.where(ask[:, None], new, bound + sign * known[name])
            surrogate = surrogates[name].detach()
            kept = torch.where(speaks[name], value, 0.0).to(surrogate).reshape(surrogate.shape)
            speaking = speaks[name].to(surrogate.device).reshape(surrogate.shape)
            found[name] = torch.where(speaking, kept, surrogate)
        self._latest = (batch["prompt_ids"], found)
        return found

    def answers_to(self, batch: Mapping[str, Any]) -> dict[int, tuple[str, bool]]:
        """By position in a batch: the answers it was judged by, (text, cut); none of another."""
        same = self._latest is not None and self._latest[0] is batch["prompt_ids"]
        return self._answers if same else {}

    @staticmethod
    def _speaks_for(
        test: Test, encoder: ConversationEncoder, batch: Mapping[str, Any], columns: Tensor
    ) -> Tensor:
        """Which responses (B, K) are themselves of the test's kind."""
        found = torch.zeros_like(columns, dtype=torch.bool)
        for row, index in enumerate(batch["index"].tolist()):
            for place, column in enumerate(columns[row].tolist()):
                if index == PADDING or column < 0:
                    continue
                text = text_of_response(encoder, batch, row, column)
                found[row, place] = passes(test, text, batch["records"][row])
        return found

    def _known(
        self, name: str, module: LanguageModelModule, index: Tensor, columns: Tensor
    ) -> Tensor:
        """Violations (B, K) that still stand; NaN of those to measure now."""
        table = self.last.get(name)
        due = not module.training or module.current_epoch % self.settings.every_n_epochs == 0
        if due or table is None:
            return torch.full(columns.shape, math.nan, dtype=torch.float64)
        return table[index].double()  # Padding reads the last row, and is never asked for.

    # The last values of the training samples ------------------------------------------------------

    def start(self) -> None:
        """At the start of a fit: those of another are forgotten."""
        if not self._restored:
            self.last = {}
        self._restored, self._latest = False, None

    def keep(self, measured: Measured | None, samples: int) -> None:
        """After a step: what it measured, of all ranks."""
        self._latest = None
        if self.settings.every_n_epochs == 1 or measured is None:
            return
        for name in self.settings.tests:
            violation, mask = measured.judged[name], measured.masks[name]
            if name not in self.last:
                self.last[name] = torch.full((samples, violation.shape[1]), math.nan)
            rows = mask.any(1)
            found = violation[rows].float().masked_fill(~mask[rows], math.nan)
            self.last[name][measured.index[rows]] = found

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Adds them to a checkpoint."""
        if self.last:
            checkpoint[_ENTRY] = dict(self.last)

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """
        Raises:
            TrainingError: what a checkpoint holds is no table.
        """
        found = checkpoint.get(_ENTRY, {})
        tables = list(found.values()) if isinstance(found, dict) else [None]
        if not all(
            isinstance(t, Tensor) and t.dtype == torch.float32 and t.dim() == 2 for t in tables
        ):
            raise TrainingError(
                f"This checkpoint has no usable {_ENTRY!r}: it is damaged, or of another version. "
                "Resume from another one, or load its weights only."
            )
        self.last = {name: table for name, table in found.items() if name in self.settings.tests}
        self._restored = True


def text_of_response(
    encoder: ConversationEncoder, batch: Mapping[str, Any], row: int, column: int
) -> str:
    """The text of a response of a batch."""
    length = int(batch["response_lengths"][row, column])
    return response_text(encoder, batch["response_ids"][row, column, :length].tolist())


def _require_room(
    name: str, batch: Mapping[str, Any], columns: Tensor, speaks: Tensor, most: int
) -> None:
    """Refuses answers of so few tokens that none could pass: half a call is none.

    columns, speaks: (B, K), which response each value is of, and whether the test speaks for it.

    Raises:
        TrainingError: the sample, and how many tokens its call has.
    """
    lengths = batch["response_lengths"].cpu().gather(1, columns.clamp(min=0))
    lengths = lengths.where(speaks, 0).amax(1) - 1  # Without the token that ends it.
    longest = int(lengths.argmax())
    if int(lengths[longest]) > most:
        raise TrainingError(
            f"judged_by.tests.{name}: the tool call of sample {int(batch['index'][longest])} has "
            f"{int(lengths[longest])} tokens, and an answer is cut after {most}, so it cannot "
            "pass. Raise policy.generation.max_new_tokens."
        )


def _bound(constraint: Constraint) -> tuple[float, int]:
    """The bound of a one-sided constraint, and the sign by which a violation lies beyond it."""
    if constraint.at_least is not None:
        return constraint.at_least, -1
    assert constraint.at_most is not None
    return constraint.at_most, 1
