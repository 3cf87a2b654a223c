"""The records of the language tasks: a conversation and responses to it, each with its role.

And the readers of the hub's usual schemas, which all tasks share. A reader takes a row, its place
for messages, and the role of a response to which its schema gives none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeVar

from pl_pointwise.tasks.common.records import (
    bad_field,
    digest,
    field,
    folded,
    json_object,
    kind,
    shown,
    text_field,
)

from .arrow_nulls import without_nulls
from .messages import (
    MASKS,
    THOUGHTS,
    WEIGHTS,
    Answer,
    is_turns,
    named_turns,
    parse_answer,
    parse_messages,
    parse_tools,
    says_of_turns,
    turn_text,
    without_weights,
)
from .offered import check_offered
from .unread import check_unread


@dataclass(frozen=True)
class Response:
    """One response to a conversation."""

    role: str  # what it is to the task, such as "prefer"
    answer: Answer | None  # None for one of the configured refusals
    # its own ε or δ, or what its band is around; None: the role's
    tolerance: float | None = None
    relative: bool = False  # whether that is δ, measured from the reference policy's s̄
    refusal: bool = False
    behaviour: str = ""  # of When2Call, "" if unknown


@dataclass(frozen=True)
class Record:
    """One conversation and its responses."""

    messages: list[dict[str, Any]]  # ending before the assistant's turn
    tools: list[dict[str, Any]]
    responses: tuple[Response, ...]
    where: str  # file and line, or source and record
    given_category: str = ""  # the record's own
    given_kind: str | None = None  # the task's name for it; None for what its roles say
    # what prompts are told apart by; (): messages and tools
    identity: tuple[Any, ...] = ()
    given_unit: str = ""  # of a part of a conversation, the whole's
    # For each turn of the assistant whether the file says that it is trained on; the last included.
    asked: tuple[bool | None, ...] = ()

    @property
    def answers(self) -> list[Answer]:
        """The responses' texts or calls."""
        return [
            "" if response.answer is None else response.answer
            for response in self.responses
        ]

    @property
    def roles(self) -> list[str]:
        """What each response is."""
        return [response.role for response in self.responses]

    @property
    def prompt(self) -> str:
        """What records of one prompt have in common, and no others."""
        identity = self.identity or (self.messages, self.tools)
        return digest(*identity)

    @property
    def text(self) -> str:
        """What the user says; of a conversation of several turns all of them."""
        if len(self.messages) == 1:
            return str(self.messages[0]["content"])
        return "\n\n".join(map(turn_text, self.messages))

    @property
    def unit(self) -> str:
        """What records whose prompts differ by case and spaces alone have in common."""
        return self.given_unit or digest(folded([self.messages, self.tools]))

    @property
    def kind(self) -> str:
        """The task's name for it, or its roles, a refusal to avoid by that name."""
        if self.given_kind is not None:
            return self.given_kind
        names = set[str]()
        for response in self.responses:
            refused = response.refusal and response.role == "avoid"
            names.add("avoid refusal" if refused else response.role)
        return " + ".join(sorted(names))

    @property
    def unsafe(self) -> bool:
        """Whether the prompt is to be refused."""
        return self.kind == "unsafe"

    @property
    def choice(self) -> bool:
        """Whether it is a multiple-choice question."""
        return self.kind == "choice"

    @property
    def opposed(self) -> list[bool]:
        """For each response whether it is to become unlikely: none of a choice, only measured."""
        unlikely = ["avoid", "forget", "unsafe answer"]
        if not self.unsafe:
            unlikely.append("refusal")
        return [not self.choice and role in unlikely for role in self.roles]

    @property
    def category(self) -> str:
        """The record's own category, else its kind."""
        return self.given_category or self.kind


T = TypeVar("T")

INSTRUCTIONS = ("messages", "instruction", "query", "conversations", "conversation")
PROMPTS = ("messages", "prompt", "instruction", "input", "question", *INSTRUCTIONS[2:])
"""Fields that hold the conversation, or the user's one turn; the first that is there is read."""

ANSWERS = ("answer", "completion", "output", "response")
"""Fields that hold the one answer of a record."""

_MEDIA = [
    *("image", "images", "image_path", "image_url"),
    *("audio", "audios", "audio_path", "audio_url"),
    *("video", "videos", "video_path", "video_url"),
]
_OFF = (
    *WEIGHTS,
    "label",
    "kto_tag",
    "is_safe",
    "safe",
    "is_correct",
    "correct",
    "accepted",
)
_TRUE, _FALSE = ("true", "1", "1.0"), ("false", "0", "0.0")
_NO = (*_FALSE, "-1", "-1.0", "no", "bad", "unsafe", "undesirable", "rejected", "wrong")
_CHANGING: Mapping[str, str] = {
    **dict.fromkeys(
        (*_OFF, *MASKS), "Take out the record, or what it says of its training"
    ),
    **dict.fromkeys(_MEDIA, "Take out the record, as texts alone are read"),
    **dict.fromkeys(
        ("history", "context", "documents", "function_call"), "Write it in messages"
    ),
    **dict.fromkeys(
        ("functions", "available_tools", "tools"), 'Give "tools" where it is read'
    ),
    **dict.fromkeys(
        ("tolerance", "around", "relative"), "Give it in responses, where it is read"
    ),
    **dict.fromkeys(("system_prompt", "system_message", "system"), "Give it as a turn"),
    **dict.fromkeys(
        ("rejected", "rejected_response", "rejected_messages"), 'Give "chosen" too'
    ),
    "chat_template_kwargs": "Set policy.template_arguments",
}
"""Fields that make a record another if nothing reads them, those of _OFF if they say _NO.

What _OFF and MASKS say is of answers, so of prompts alone it makes nothing another.
"""


def reads_whole(parse: Callable[..., T]) -> Callable[..., T]:
    """``parse`` of a row with turns in our form; it may leave out nothing of :data:`_CHANGING`.

    What it makes takes besides ``all_turns``: whether each turn of the assistant is trained on, so
    that what turns say of their training is the record's ``asked``.
    """

    @wraps(parse)
    def read(row: Any, where: str, *, all_turns: bool = False, **options: Any) -> T:
        row = json_object(row, where)
        asked: tuple[bool | None, ...] = ()
        for name in row:
            turns = named_turns(dict.get(row, name), where, name)
            asked += says_of_turns(turns)
            row[name] = without_weights(turns, all_turns)
        record: Any = parse(row, where, **options)
        if all_turns:
            record = replace(record, asked=asked)
        inner = getattr(record, "record", record)
        responses = inner.responses
        check_offered(inner, where, all_turns=all_turns)
        has_answers = any(response.answer for response in responses)
        for name, value in row.unread().items():
            _check_left(name, value, has_answers, where)
        check_unread(row, record, where)
        return without_nulls(record)

    return read


def _check_left(name: str, value: Any, has_answers: bool, where: str) -> None:
    """Refuses a field that nobody reads, and that makes the record another."""
    last = name.rpartition(".")[2]
    # Other names are check_unread()'s.
    if last not in _CHANGING:
        return
    of_answers = last in _OFF or last in MASKS
    says_no = str(value).lower() in _NO if last in _OFF else truth(value) is not False
    if says_no and (has_answers or not of_answers):
        problem = f"is {shown(value)}, is not read, and makes the record another"
        raise bad_field(where, name, problem, _CHANGING[last])


def make_record(
    row: dict[str, Any],
    messages: list[dict[str, Any]],
    responses: Sequence[Response],
    where: str,
) -> Record:
    """A record with what is common to all schemas: "tools" and "category"."""
    if not messages:
        raise bad_field(
            where, "messages", "has no turn before the answer", "Give the question"
        )
    # A generation prompt behind it would begin a second turn of the assistant.
    if messages[-1]["role"] == "assistant":
        problem = "ends with the assistant's turn, which is the answer's place"
        raise bad_field(where, "messages", problem, "Take the last message out")
    category = row["category"] if isinstance(dict.get(row, "category"), str) else ""
    tools = parse_tools(row.get("tools"), where)
    return Record(messages, tools, tuple(responses), where, category)


def conversation(
    row: dict[str, Any],
    where: str,
    then: Sequence[Any] = (),
    prompts: Sequence[str] = PROMPTS,
) -> list[dict[str, Any]]:
    """The turns in the first of ``prompts``, a list or the user's text, behind a "system" prompt.

    An "instruction" has its "input".

    then: turns that stand behind them or begin with them, as those in front of an answer.
    """
    name = _first(row, prompts, "prompt")
    messages = [] if then and not dict.get(row, name) else _turns(row, name, where)
    system = row.get("system")
    if str(system or "").strip():
        turn = {"role": "system", "content": text_field(system, "system", where)}
        messages = [turn] * (messages[:1] != [turn]) + messages
    return _joined(messages, list(then), where, name) if then else messages


def _first(row: dict[str, Any], names: Sequence[str], otherwise: str) -> str:
    """The first of these fields that holds something, else the first that is there."""
    present = [name for name in names if name in row]
    filled = next((name for name in present if row.get(name)), None)
    if filled is not None:
        return filled
    return present[0] if present else otherwise


def _turns(row: dict[str, Any], name: str, where: str) -> list[dict[str, Any]]:
    """The turns in a field: a list, or the user's text."""
    turns = field(row, name, where)
    if isinstance(turns, str):
        text = text_field(turns, name, where)
        more = row.get("input") if name == "instruction" else None  # Alpaca's.
        if str(more or "").strip():
            text = f"{text}\n\n{text_field(more, 'input', where)}"
        turns = [{"role": "user", "content": text}]
    # An object, a number: no conversation in any schema.
    if not isinstance(turns, list):
        raise bad_field(
            where, name, f"is {kind(turns)}", "Give a text, or [{role, content}]"
        )
    return parse_messages(turns, where, name)


def _joined(first: Any, then: Any, where: str, name: str) -> list[dict[str, Any]]:
    """Two lists of turns as one; what ends the first and begins the other stands once."""
    start = folded(first)
    end = folded(then)
    # UltraFeedback repeats the prompt in front of each answer.
    for shared in range(min(len(first), len(then)), 0, -1):
        if start[-shared:] == end[:shared]:
            return first + then[shared:]
    # One of the two is only the beginning of the other.
    if not first or first[-1]["role"] == "system" or then[0]["role"] == "assistant":
        return first + then
    problem = "and the turns before the answer are two conversations"
    raise bad_field(
        where, name, problem, "Let these begin with it, or take one of the two out"
    )


def with_refusals(records: Iterable[Record], refusals: Sequence[str]) -> list[Record]:
    """The records with one of ``refusals``, by their prompt, where a refusal has no text."""
    filled = []
    for record in records:
        text = refusals[int(record.prompt[:12], 16) % len(refusals)]
        responses = []
        for response in record.responses:
            needs_text = response.answer is None
            responses.append(replace(response, answer=text) if needs_text else response)
        filled.append(replace(record, responses=tuple(responses)))
    return filled


# The hub's schemas --------------------------------------------------------------------------------


def read_preference(row: dict[str, Any], where: str, role: str = "") -> Record:
    """{"chosen", "rejected"} behind a prompt, or with the conversation that both have in front."""
    whole_chosen = transcript(field(row, "chosen", where))
    whole_rejected = transcript(field(row, "rejected", where))
    # Which of the two is called chosen is an accident then.
    if row.get("status") == "tie":
        raise bad_field(
            where, "status", "says that neither answer is better", "Take it out"
        )
    _check_scores(row, where)
    before, chosen = _behind(whole_chosen, where, "chosen")
    others, rejected = _behind(whole_rejected, where, "rejected")
    # Two answers to two questions say nothing of which is better.
    if is_turns(whole_rejected) and others != before:
        problem = "follows another conversation than the chosen one"
        raise bad_field(
            where, "rejected", problem, "Let them differ in the answer alone"
        )
    if (
        before and dict.get(row, "messages") == whole_chosen
    ):  # UltraFeedback has the chosen one twice.
        del row["messages"]
    messages = conversation(row, where, before)
    answers = (
        parse_answer(chosen, where, "chosen"),
        parse_answer(rejected, where, "rejected"),
    )
    return _pair(row, messages, answers, where)


_SCORES = re.compile("score|rating|reward|quality|grade|rank", re.IGNORECASE)


def _check_scores(row: dict[str, Any], where: str) -> None:
    """Refuses a pair of which the row's own scores say that neither answer is the better one."""
    for name, value in row.items():
        other = re.sub("chosen", "rejected", name, flags=re.IGNORECASE)
        # A score of one answer alone compares nothing.
        if other == name or other not in row or not _SCORES.search(name):
            continue
        of_rejected = dict.get(row, other)
        if not isinstance(value, (int, float)) or not isinstance(
            of_rejected, (int, float)
        ):
            continue
        if value == of_rejected:
            problem = f"equals {other} ({value}): neither answer is better"
            raise bad_field(where, name, problem, "Take the record out")
        # The first of a ranking is the best.
        if value < of_rejected and "rank" not in name.lower():
            problem = (
                f"({value}) is below {other} ({of_rejected}): "
                "the rejected answer is the better one"
            )
            raise bad_field(
                where, name, problem, "Exchange the answers, or take the record out"
            )


def _behind(value: Any, where: str, name: str) -> tuple[list[dict[str, Any]], Any]:
    """Of an answer the turns before it, none if it is no list of several turns, and the last.

    A text may be a transcript, as Anthropic's preferences are.
    """
    value = transcript(value)
    # The answer alone; the conversation stands in another field.
    if not is_turns(value) or len(value) == 1:
        return [], value
    return parse_messages(value[:-1], where, name), value[-1]


_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")


def transcript(value: Any) -> Any:
    """The turns of a text that begins with "Human:" and goes on with "Assistant:"; else the value.

    >>> transcript("\\n\\nHuman: Hi\\n\\nAssistant: Yes?")[1]
    {'role': 'assistant', 'content': 'Yes?'}
    """
    if not isinstance(value, str):
        return value
    first, *parts = _SPEAKER.split(value.strip())
    speakers = parts[::2]
    # A text that only speaks of humans and assistants.
    if first or speakers[:2] != ["Human", "Assistant"]:
        return value
    roles = {"Human": "user", "Assistant": "assistant"}
    texts = zip(speakers, parts[1::2], strict=True)
    return [
        {"role": roles[speaker], "content": text.strip()} for speaker, text in texts
    ]


def read_when2call(row: dict[str, Any], where: str, role: str = "") -> Record:
    """{"messages", "tools", "chosen_response", "rejected_response"}, and both behaviours."""
    answers = []
    for name in ("chosen_response", "rejected_response"):
        answers.append(
            parse_answer(field(row, name, where), where, name, bare_calls=True)
        )
    behaviours = [
        str(row.get(name) or "") for name in ("category", "rejected_category")
    ]
    return _pair(row, conversation(row, where), answers, where, behaviours)


def _pair(
    row: Any,
    messages: Any,
    answers: Sequence[Any],
    where: str,
    behaviours: Any = ("", ""),
) -> Record:
    """A record of two responses, the first of which is to be preferred."""
    chosen, rejected = [a.strip() if isinstance(a, str) else a for a in answers]
    # Likely and unlikely at once: no model does it.
    if chosen == rejected:
        raise bad_field(
            where, "rejected", "equals the chosen one", "Change one of the two"
        )
    pair = zip(("prefer", "avoid"), answers, behaviours, strict=True)
    responses = [Response(role, answer, behaviour=name) for role, answer, name in pair]
    return make_record(row, messages, responses, where)


def answered(
    row: dict[str, Any], where: str, prompts: Sequence[str], answers: Sequence[str]
) -> tuple[list[dict[str, Any]], Any, str]:
    """(conversation, answer, the field that holds it), of the first of these fields."""
    name = _first(row, answers, answers[0])
    before, answer = _behind(field(row, name, where), where, name)
    answer = with_thought(row, answer, where)
    return conversation(row, where, before, prompts), answer, name


def with_thought(row: dict[str, Any], answer: Any, where: str) -> Any:
    """The answer with the thought that stands beside it in a field of its own, if one does."""
    name = next((key for key in THOUGHTS if str(row.get(key) or "").strip()), None)
    if name is None:
        return answer
    thought = text_field(row[name], name, where)
    turn = answer[-1] if is_turns(answer) else answer
    if isinstance(turn, str):
        return {"role": "assistant", "content": turn, "reasoning_content": thought}
    if isinstance(turn, dict) and ("content" in turn or "tool_calls" in turn):
        # Which of the two is the answer's cannot be told.
        if any(str(turn.get(key) or "").strip() for key in THOUGHTS):
            problem = "stands beside an answer that has a thought of its own"
            raise bad_field(where, name, problem, "Take one of the two out")
        return {**turn, "reasoning_content": thought}
    return {"role": "assistant", "tool_calls": answer, "reasoning_content": thought}


def response_of(role: str, value: Any, where: str, name: str) -> Response:
    """A response that is a text, a message, or calls."""
    return Response(role, parse_answer(value, where, name), refusal=role == "refuse")


def truth(value: Any) -> bool | None:
    """What a value says that is true or false, 1 or 0, also as a text of a CSV file; else None."""
    word = str(value).lower()
    return word in _TRUE if word in (*_TRUE, *_FALSE) else None


def flag(row: dict[str, Any], name: str, where: str, prefix: str = "") -> bool:
    """A field that is true or false; ``prefix`` stands before its name in messages."""
    value = field(row, name, where, prefix)
    is_true = truth(value)
    if is_true is None:
        raise bad_field(
            where, f"{prefix}{name}", f"is {kind(value)}", "Give true or false"
        )
    return is_true
