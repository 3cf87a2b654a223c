"""Conversations as people write them, read into one form.

    messages   [{"role", "content"}], roles system, developer, user, assistant and tool. A turn of
               the assistant may have "tool_calls", and then no content; "reasoning_content" is its
               thought.
    tools      descriptions, each an object or its JSON
    answer     an assistant's turn: a text, tool calls, or several of text, calls and thought

Tool calls are read as OpenAI writes them, [{"function": {"name", "arguments"}, …}], and flat,
[{"name", "arguments"}], their arguments as an object or as its JSON. In messages they have OpenAI's
form afterwards, in answers the flat one, arguments always an object.

A parser takes a value, ``where`` its record stands and the name of its field, and raises a
DataError that names them and the remedy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from pl_pointwise.tasks.common.records import (
    RepeatedKeyError,
    Row,
    bad_field,
    field,
    from_json,
    kind,
    shown,
    text_field,
    tracked,
    validate_values,
)

Message = Mapping[str, Any]

Answer = str | list[dict[str, Any]] | dict[str, Any]
"""A text, or tool calls, or a turn of at least two of "content", "tool_calls" (flat ones too) and
"reasoning_content"."""

ROLES = ("system", "developer", "user", "assistant", "tool")

SPEAKERS = {"human": "user"}
SPEAKERS |= dict.fromkeys(
    ("gpt", "chatgpt", "bing", "bard", "bot", "model"), "assistant"
)
SPEAKERS |= dict.fromkeys(
    ("observation", "function", "tool_response", "tool_result"), "tool"
)
SPEAKERS |= dict.fromkeys(("ipython", "environment"), "tool")
"""Other names of roles, in any case; an assistant's calls are "function_call" or "tool_call"."""

WEIGHTS = ("weight", "loss_weight", "loss", "train", "training")
"""What a record or turn has that is not to be trained on, 0 or false."""

MASKS = ("prefix", "mask", "masked", "loss_mask", "ignore", "ignored", "skip")
"""The same, 1 or true."""

_YES_OR_NO = ("0", "0.0", "1", "1.0", "false", "true")
_SYSTEM = ROLES[:2]
_OPEN, _CLOSE = "<TOOLCALL>", "</TOOLCALL>"
THOUGHTS = (
    "reasoning_content",
    "reasoning",
    "thinking",
    "thought",
    "cot",
    "chain_of_thought",
)
"""Fields of a turn, or beside an answer, that hold its thought; the first that is filled."""

_CALL = ("name", "arguments")
_CALLS_REMEDY = 'Give [{"name": …, "arguments": {…}}]'
_KEY = r"""(['"])(role|content|from|value)\{}\s*:"""
_LIST_OF_TURNS = r"\s*\[\s*\{\s*" + _KEY.format(1) + ".*" + _KEY.format(3)


@dataclass(frozen=True)
class Parts:
    """What an answer consists of; "" and [] are absent."""

    text: str = ""
    calls: Sequence[Mapping[str, Any]] = ()
    reasoning: str = ""


def parts_of(answer: Answer) -> Parts:
    """The parts of an answer."""
    if isinstance(answer, str):
        return Parts(answer)
    if isinstance(answer, list):
        return Parts(calls=answer)
    thought = answer.get("reasoning_content", "")
    return Parts(answer.get("content", ""), answer.get("tool_calls", ()), thought)


def answer_text(answer: Answer) -> str:
    """An answer for reports: its text, and everything else as JSON."""
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def turn_text(message: Message) -> str:
    """A turn for reports: role, content, and tool calls as JSON."""
    lines = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls") or []:
        lines.append(answer_text(call["function"]))
    return f"{message['role']}: " + "\n".join(lines)


# Messages -----------------------------------------------------------------------------------------


def parse_messages(
    value: Any, where: str, name: str = "messages"
) -> list[dict[str, Any]]:
    """The turns of a conversation; ``name`` is the field's."""
    turns = _filled_list(value, where, name, "Give a list of {role, content}")
    kept = []
    for place, raw in enumerate(turns):
        turn = _turn(raw, where, f"{name}[{place}]")
        # An empty system prompt is none.
        if turn["content"] or turn["role"] not in _SYSTEM:
            kept.append(turn)
    return _filled_list(kept, where, name, "Give a turn of the user")


def is_turns(value: Any) -> bool:
    """Whether a list is one of messages rather than of tool calls or texts."""
    turns = value if isinstance(value, list) else []
    return bool(turns) and all(
        isinstance(turn, dict) and "role" in turn for turn in turns
    )


def named_turns(value: Any, where: str, name: str) -> Any:
    """Turns {"from", "value"}, one, a list or its JSON, as {role, content}; else unchanged."""
    listed = name == "responses" or re.match(_LIST_OF_TURNS, str(value), re.DOTALL)
    if listed and isinstance(value, str):
        value = tracked(
            from_text(value, where, name, "Give a list of {role, content} as JSON")
        )
    if not isinstance(value, list):
        return _named(value, where, name)
    return [_named(turn, where, f"{name}[{place}]") for place, turn in enumerate(value)]


def says_of_turns(value: Any) -> tuple[bool | None, ...]:
    """For each turn of the assistant whether it says that it is trained on; None: it does not say.

    A turn says so by a "weight" of 0 or 1, a "mask" and their like.
    """
    turns = (
        [turn for turn in value if isinstance(turn, Row)]
        if isinstance(value, list)
        else []
    )
    return tuple(_says(turn) for turn in turns if dict.get(turn, "role") == "assistant")


def _says(turn: Row) -> bool | None:
    for name in (*WEIGHTS, *MASKS):
        value = dict.get(turn, name)
        if value is not None:
            return (str(value).lower() not in ("0", "0.0", "false")) is (
                name in WEIGHTS
            )
    return None


def without_weights(turns: Any, all_turns: bool) -> Any:
    """The turns without weights that ask for what is done: the assistant's last turn is trained on.

    all_turns: without those that say yes or no, as each turn is trained on for which they do not
    say no. A weight between is left, and refused as any field that nobody reads.
    """
    for place, turn in enumerate(turns if isinstance(turns, list) else ()):
        role = dict.get(turn, "role") if isinstance(turn, Row) else None
        if role in ROLES:
            is_answer = role == "assistant"
            last = place == len(turns) - 1
            _drop_weights(
                turn, read=all_turns and is_answer, trained=last and is_answer
            )
    return turns


def _drop_weights(turn: Row, *, read: bool, trained: bool) -> None:
    """Takes out of a turn what it says of its training, if that is done or it is no answer.

    read: whether what it says is read; trained: whether it is the turn that is trained on.
    """
    for key in (*WEIGHTS, *MASKS):
        weight = dict.get(turn, key)
        says_it = read and (weight is None or str(weight).lower() in _YES_OR_NO)
        is_done = weight == (key in WEIGHTS)
        if says_it or is_done or not (read or trained):
            turn.pop(key, None)


def _named(turn: Any, where: str, name: str) -> Any:
    """A turn under our names."""
    if not isinstance(turn, Row):
        return turn
    keys = set(turn.keys())
    who = next((key for key in ("role", "from") if key in keys), None)
    content = next((key for key in ("content", "value") if key in keys), None)
    speaker = dict.get(turn, who) if who else None
    # An object that is no turn, such as a part of a content.
    if who is None or not isinstance(speaker, str):
        return turn
    if who == "role" and content != "value" and speaker in ROLES:  # In our form.
        return turn
    speaker = speaker.lower()
    if content is None and who == "from":  # Of something else than a conversation.
        return turn
    renamed: dict[str, Any] = {}
    for key, value in turn.items():
        if key not in (who, content):
            renamed[key] = value
    renamed["role"] = SPEAKERS.get(speaker, speaker)
    if content:
        renamed["content"] = dict.get(turn, content)
    # ShareGPT's: the turn's text is the JSON of its calls.
    if speaker in ("function_call", "tool_call"):
        calls = from_text(
            renamed.get("content"), where, f"{name}.{content}", _CALLS_REMEDY
        )
        renamed |= {"role": "assistant", "content": None, "tool_calls": _as_list(calls)}
    return Row(renamed)


def _turn(turn: Any, where: str, name: str) -> dict[str, Any]:
    """A turn in our form."""
    if not isinstance(turn, dict):
        raise bad_field(where, name, f"is {kind(turn)}", "Give {role, content}")
    turn = _without_thoughts(turn, where, name)
    role = field(turn, "role", where, f"{name}.")
    # OpenAI's form before there were several calls a turn.
    older = turn.get("function_call") if role == "assistant" else None
    if older and not turn.get("tool_calls"):
        turn = copy(turn)  # a Row's copy shares what was read
        turn["tool_calls"] = [older]
    calls = turn.get("tool_calls")
    if isinstance(calls, str):
        text = calls.strip()
        calls = (
            from_text(calls, where, f"{name}.tool_calls", _CALLS_REMEDY)
            if text
            else None
        )
    if role not in ROLES:
        remedy = f"Give one of {', '.join(ROLES)}"
        raise bad_field(where, f"{name}.role", f"is {shown(role)}", remedy)
    # Templates leave such calls out in silence.
    if calls and role != "assistant":
        problem = f"stands in a turn of role {role}"
        raise bad_field(
            where, f"{name}.tool_calls", problem, "Only the assistant calls tools"
        )
    parsed: dict[str, Any] = {"role": role, "content": _content(turn, where, name)}
    if calls:
        parsed["tool_calls"] = _listed_calls(calls, where, f"{name}.tool_calls")
    if role == "assistant":
        key = next((key for key in THOUGHTS if str(turn.get(key) or "").strip()), None)
        if key is not None:
            parsed["reasoning_content"] = text_field(turn[key], f"{name}.{key}", where)
    if role == "tool":
        for key in ("tool_call_id", "name"):
            if turn.get(key) is not None:
                parsed[key] = text_field(turn[key], f"{name}.{key}", where)
    return parsed


def _content(turn: dict[str, Any], where: str, name: str) -> str:
    """The text of a turn; "" of an assistant who only calls, or of a tool that says nothing."""
    role = turn["role"]
    calls = turn.get("tool_calls")
    content: Any = (
        turn.get("content") if calls else field(turn, "content", where, f"{name}.")
    )
    # A list of texts as OpenAI writes them, or under "value".
    if isinstance(content, list) and all(map(_is_text, content)):
        content = "".join(part.get("text", part.get("value")) for part in content)
    # A result as values: templates write texts.
    elif role == "tool" and isinstance(content, (dict, list)):
        return json.dumps(content, ensure_ascii=False)
    # Images and audio: texts alone are read.
    elif isinstance(content, list):
        remedy = 'Give a text, or [{"type": "text", "text": …}]'
        raise bad_field(where, f"{name}.content", "holds what is no text", remedy)
    if (calls or role in ("tool", *_SYSTEM)) and not str(content or "").strip():
        return ""
    return text_field(content, f"{name}.content", where)


_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of parts of a content, as OpenAI's two forms name them."""


def _is_text(part: Any) -> bool:
    if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
        return False
    return isinstance(part.get("text", part.get("value")), str)


def _without_thoughts(turn: dict[str, Any], where: str, name: str) -> dict[str, Any]:
    """A turn whose parts of type "thinking" are its thought, as Mistral and Anthropic write one."""
    content = dict.get(turn, "content")
    parts = content if isinstance(content, list) else []
    thoughts = [p for p in parts if isinstance(p, dict) and p.get("type") == "thinking"]
    # A content without parts of that type, or a text.
    if not thoughts:
        return turn
    texts: list[str] = []
    for part in thoughts:
        inner = part.get("thinking")
        # Anthropic's is a text, Mistral's a list of parts.
        if not isinstance(inner, list):
            inner = [{"type": "text", "text": inner}]
        if not all(map(_is_text, inner)):
            remedy = 'Give {"type": "thinking", "thinking": a text}'
            raise bad_field(
                where, f"{name}.content", "holds a thought that is no text", remedy
            )
        texts += [text_part["text"] for text_part in inner]
    changed = copy(turn)  # a Row's copy shares what was read
    changed["content"] = [part for part in parts if part not in thoughts]
    changed["reasoning_content"] = "\n".join(texts)
    return changed


def _filled_list(value: Any, where: str, name: str, remedy: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        problem = "is empty" if value == [] else f"is {kind(value)}"
        raise bad_field(where, name, problem, remedy)
    return value


# Tools --------------------------------------------------------------------------------------------


def parse_tools(value: Any, where: str) -> list[dict[str, Any]]:
    """Descriptions of tools as objects; each, or the list, may be JSON. null is none."""
    if isinstance(value, str):
        value = (
            from_text(value, where, "tools", "Give a list of tools")
            if value.strip()
            else []
        )
    if not isinstance(value, (list, type(None))):
        raise bad_field(
            where, "tools", f"is {kind(value)}", "Give a list of tools, or []"
        )
    tools = []
    for place, raw in enumerate(value or []):
        name = f"tools[{place}]"
        tool = from_text(raw, where, name, "Give one JSON object a tool")
        described = None
        # A copy, as a Row would note what is read of it.
        if isinstance(tool, dict):
            tool = dict(tool)
            described = tool.get("function", tool)  # OpenAI's form, or the flat one.
        if not isinstance(described, dict) or not isinstance(
            described.get("name"), str
        ):
            raise bad_field(
                where, name, "has no name", "Give {name, description, parameters}"
            )
        tools.append(tool)
    return tools


def from_text(value: Any, where: str, name: str, remedy: str) -> Any:
    """What a JSON text holds; any other value unchanged."""
    try:
        return validate_values(from_json(value)) if isinstance(value, str) else value
    except ValueError as error:
        # pandas' to_csv writes a list by str(), with single quotes.
        if re.match(r"\s*[\[{]+\s*'", value):
            problem = "is a list as Python prints it, as to_csv writes one, and no JSON"
            raise bad_field(
                where, name, problem, "Write the data as JSON lines"
            ) from error
        raise bad_field(
            where, name, f"is not readable JSON ({error})", remedy
        ) from error


# Answers ------------------------------------------------------------------------------------------


def parse_answer(
    value: Any, where: str, name: str, *, bare_calls: bool = False
) -> Answer:
    """An answer: a text, tool calls, or an assistant's turn (or list of one) with either or both.

    A text ``<TOOLCALL>[{"name", "arguments"}]</TOOLCALL>`` is tool calls; with ``bare_calls`` so is
    one that is JSON of a call, or of a list of calls.
    """
    # OpenAI's and Anthropic's answers stand in a list of one message.
    if is_turns(value):
        if len(value) > 1:
            problem = f"has {len(value)} turns"
            raise bad_field(where, name, problem, "Give the assistant's one turn")
        value = value[0]
        name = f"{name}[0]"
    if isinstance(value, dict) and not {"role", "content", "tool_calls"}.isdisjoint(
        value
    ):
        return _answering_turn(value, where, name, bare_calls)
    if (
        isinstance(value, list)
        and value
        and all(isinstance(entry, str) for entry in value)
    ):
        raise bad_field(
            where, name, f"is a list of {len(value)} texts", "Give one text"
        )
    if isinstance(value, dict) and {"name", "function"}.isdisjoint(value):
        problem = (
            f"is an object of {', '.join(map(shown, list(value)[:6])) or 'nothing'}"
        )
        raise bad_field(
            where,
            name,
            problem,
            "Give a text, or {content}, or a call {name, arguments}",
        )
    if isinstance(value, (dict, list)):
        return [
            call["function"] for call in _listed_calls(_as_list(value), where, name)
        ]
    return _text_or_calls(text_field(value, name, where), where, name, bare_calls)


def _answering_turn(
    turn: dict[str, Any], where: str, name: str, bare_calls: bool
) -> Answer:
    if turn.get("role", "assistant") != "assistant":
        problem = f"is {shown(turn['role'])}"
        raise bad_field(where, f"{name}.role", problem, "An answer is the assistant's")
    turn = copy(turn)  # a Row's copy shares what was read
    turn.setdefault("role", "assistant")
    parsed = _turn(turn, where, name)
    answer = {
        key: parsed[key] for key in ("content", "reasoning_content") if parsed.get(key)
    }
    calls: Any = [call["function"] for call in parsed.get("tool_calls", ())]
    if not calls:
        in_text = _text_or_calls(
            parsed["content"], where, f"{name}.content", bare_calls
        )
        if isinstance(in_text, list):
            calls = in_text
            del answer["content"]
    if calls:
        answer["tool_calls"] = calls
    return answer if len(answer) > 1 else next(iter(answer.values()))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


# Tool calls ---------------------------------------------------------------------------------------


def _listed_calls(value: Any, where: str, name: str) -> list[dict[str, Any]]:
    """[{"type": "function", "function": {"name", "arguments"}}], with "id" where it is given."""
    listed_calls = []
    for place, call in enumerate(_filled_list(value, where, name, _CALLS_REMEDY)):
        name_of_call = f"{name}[{place}]" if len(value) > 1 else name
        outer = call if isinstance(call, dict) else {}
        function = outer.get("function", call)
        try:
            listed: dict[str, Any] = {"type": "function", "function": _call(function)}
        except ValueError as error:
            problem = f"is malformed ({error})"
            raise bad_field(where, name_of_call, problem, _CALLS_REMEDY) from None
        # Ids join calls and results; Mistral's and Kimi-K2's templates write them.
        if outer.get("id") is not None:
            listed["id"] = text_field(outer["id"], f"{name_of_call}.id", where)
        listed_calls.append(listed)
    return listed_calls


def _text_or_calls(text: str, where: str, name: str, bare: bool) -> Answer:
    """The calls in ``<TOOLCALL>[…]</TOOLCALL>``, with ``bare`` in JSON alone; or the text."""
    inner = text.strip()
    remedy = f"{_CALLS_REMEDY} in {_OPEN}"
    marked = inner.startswith(_OPEN) and inner.endswith(_CLOSE)
    # When2Call's marks around a part of the text: which part the model is to say is unclear.
    if _OPEN in inner and not marked:
        problem = f"mixes text and a tool call, or does not end in {_CLOSE}"
        raise bad_field(where, name, problem, remedy)
    # JSON may be what a user asked for; When2Call's multiple choice has bare calls.
    if not marked and not (bare and inner.startswith(("{", "["))):
        return text
    try:
        content = validate_values(
            from_json(inner.removeprefix(_OPEN).removesuffix(_CLOSE))
        )
        calls = [_call(call) for call in _as_list(content)]
        if not calls:
            raise ValueError("no call in it")
        return calls
    except ValueError as error:
        # Any other JSON may be an answer's text.
        if marked or isinstance(error, RepeatedKeyError):
            problem = f"is a malformed tool call ({error})"
            raise bad_field(where, name, problem, remedy) from None
        return text


def _call(call: Any) -> dict[str, Any]:
    """A call as {name, arguments}; ValueError of anything else."""
    if isinstance(call, dict):
        # Columns of a table leave nulls where other calls have a field.
        call = {
            key: value
            for key, value in call.items()
            if value is not None or key in _CALL
        }
        if "arguments" not in call and "parameters" in call:  # as Llama 3.1 writes them
            call["arguments"] = call.pop("parameters")
    if not isinstance(call, dict) or set(call) - {"id", "type"} != {
        "name",
        "arguments",
    }:
        raise ValueError("a call is an object of name and arguments")
    name = call["name"]
    arguments = call["arguments"]
    # OpenAI's API gives arguments as their JSON, and "" for none.
    if arguments is None or isinstance(arguments, str):
        arguments = validate_values(from_json((arguments or "").strip() or "{}"))
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("a call's name is a text, its arguments an object")
    return {"name": name, "arguments": arguments}
