"""Prompt and response are what a template writes for the whole conversation, or differ as listed.

Of the templates in this folder and of those that TRL's package has; docs/templates.md says why each
difference is there.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.language_model.text.conversations import (
    DATE,
    ConversationEncoder,
)
from pl_pointwise.tasks.language_model.text.records import Record, Response
from tests.tasks.conftest import build_tokenizer

OWN = Path(__file__).parent / "templates"
TOKEN = re.compile(
    r"<\|[A-Za-z_]+\|>|<\|[a-z_]+>|<[a-z_]+\|>|<｜[^｜>]+｜>|<(?:start|end)_of_turn>|\[/?[A-Z_]{3,}\]"
    r"|<sop>|</s>"
)
ID = "abcdefgh2"
ASKED = {"role": "user", "content": "Hi"}
TOOL = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {}},
}
CALL = {"name": "add", "arguments": {"a": 1}}
TEXT, THOUGHT = (
    "I'm sorry, but I cannot.",
    {"content": "Four.", "reasoning_content": "I add."},
)


def said(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def calling(content: str, name: str) -> dict[str, Any]:
    return said(
        content, tool_calls=[{"type": "function", "id": name, "function": CALL}]
    )


PAST = [ASKED, calling("", "abcdefgh1")]
PAST += [
    {"role": "tool", "name": "add", "tool_call_id": "abcdefgh1", "content": "One."}
]

# by name: the conversation, its tools, the answer as a record has it, and as a message
CASES: dict[str, tuple[list[Any], list[Any], Any, dict[str, Any]]] = {
    "plain": ([ASKED], [], TEXT, said(TEXT)),
    "blanks": ([ASKED], [], " a\n\n\tb {x}: 'c' \n", said(" a\n\n\tb {x}: 'c' \n")),
    "system": (
        [{"role": "system", "content": "Be kind."}, ASKED],
        [],
        TEXT,
        said(TEXT),
    ),
    "history": ([ASKED, said("Yes?"), ASKED], [], TEXT, said(TEXT)),
    "tools": ([ASKED], [TOOL], TEXT, said(TEXT)),
    "call": ([ASKED], [TOOL], [CALL], calling("", ID)),
    "both": (
        [ASKED],
        [TOOL],
        {"content": "Wait.", "tool_calls": [CALL]},
        calling("Wait.", ID),
    ),
    "result": (PAST, [TOOL], TEXT, said(TEXT)),
    "thought": (
        [ASKED],
        [],
        THOUGHT,
        said("Four.", reasoning_content="I add.", thinking="I add."),
    ),
    "thought in the text": (
        [ASKED],
        [],
        "<think>\nI add.\n</think>\n\nFour.",
        said("Four.", reasoning_content="I add.", thinking="I add."),
    ),
}

# of texts that are lists of parts
SEVERAL_PARTS = ("idefics3", "llava_next", "smolvlm")


@cache
def sources() -> dict[str, str]:
    found = {
        path.stem: path.read_text(encoding="utf-8") for path in OWN.rglob("*.jinja")
    }
    spec = find_spec("trl")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for path in Path(place, "chat_templates").glob("*.jinja"):
            if not path.stem.endswith("_training") and not path.stem.startswith(
                SEVERAL_PARTS
            ):
                found.setdefault(f"trl {path.stem}", path.read_text(encoding="utf-8"))
    return found


def encoder(source: str) -> ConversationEncoder:
    """With the mark that ends a turn as end token, else </s>."""
    tokenizer: Any = build_tokenizer()
    tokenizer.chat_template = source
    tail = tokenizer.apply_chat_template([ASKED, said("PROBE")], tokenize=False).split(
        "PROBE"
    )[-1]
    end = next(iter(TOKEN.findall(tail)[::-1]), "</s>")
    others = sorted({*TOKEN.findall(source)} - {end})
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": end})
    tokenizer.add_special_tokens({"additional_special_tokens": others})
    return ConversationEncoder(tokenizer)


def difference(made: ConversationEncoder, whole: str, pair: str) -> str:
    """How the pair differs from the whole; "" if by blanks behind its end alone."""
    if pair == whole or (whole.startswith(pair) and not whole[len(pair) :].strip()):
        return ""
    found = []
    if "call00000" in pair:
        whole, found = whole.replace(ID, "call00000"), ["id"]
    closing = next(
        c for c in (made.closing, made.traits.behind_call.closing) if pair.endswith(c)
    )
    pair = pair.removesuffix(closing).rstrip()
    rest = whole[len(pair) :] if whole.startswith(pair) else None
    if rest is None:
        marks = "|".join(
            f"(?:{re.escape(b)})?\\s*{{}}\\s*{re.escape(e)}" for b, e in made.thoughts
        )
        for kind, thought in (("empty thought", ""), ("thought", r"I add\.")):
            pattern = marks.replace("{}", thought) + r"\s*"
            bare = [re.sub(rf"(?:{pattern})\s*", "", text) for text in (whole, pair)]
            squeezed = ["".join(text.split()) for text in bare]
            if squeezed[0].startswith(squeezed[1]):
                found.append(kind)
                rest = squeezed[0][len(squeezed[1]) :]
                break
    if rest is None:
        return "OTHER"
    if rest.strip() != closing.strip():  # of the template none, or more of them
        found.append("end" if not TOKEN.sub("", rest).strip() else "OTHER")
    return " + ".join(found)


@cache
def differences() -> dict[str, dict[str, set[str]]]:
    """By case and difference the templates that have it; "refused" is one."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, source in sources().items():
        made = encoder(source)
        for case, (messages, tools, answer, message) in CASES.items():
            listed = [{"type": "function", "function": tool} for tool in tools] or None
            record = Record(messages, tools, (Response("reference", answer),), "here")
            try:
                prompt, (response,) = made.texts(record)
            except DataError:
                found[case]["refused"].add(name)
                continue
            turns = [*messages, message]
            try:
                whole = made.tokenizer.apply_chat_template(
                    turns, tools=listed, tokenize=False
                )
            except Exception:  # of jinja2: arguments of calls as texts
                whole = f"{prompt}{response}"
            found[case][difference(made, str(whole), prompt + response)].add(name)
    return found


@pytest.fixture(autouse=True)
def _a_day_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package gives every template :data:`DATE` as today's."""

    class Day(type(DATE)):  # type: ignore[misc]
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return DATE

    monkeypatch.setattr(chat_template_utils, "datetime", Day)


def test_a_pair_is_the_whole_conversation_or_differs_as_the_page_says() -> None:
    kinds = {kind for of_case in differences().values() for kind in of_case}
    documented = {"empty thought", "thought", "end", "id", "thought + end"}
    assert kinds - documented == {"", "refused", "OTHER"}
    # A system turn in the last user's, which Mistral's template leaves out once an answer follows.
    other = {case: of["OTHER"] for case, of in differences().items() if of["OTHER"]}
    assert other == {"system": {"mistral_v3"}}


OPENS = {
    "deepseek_r1",
    "deepseek_v3",
    "qwq",
    "trl deepseek_r1_distill",
    "trl deepseekv3",
}
"""Of these the generation prompt begins a thought, and answers are written without one."""


@pytest.mark.parametrize("case", [case for case in CASES if "thought" not in case])
def test_an_empty_thought_is_put_where_the_prompt_begins_one(case: str) -> None:
    found = differences()[case]["empty thought"]
    assert found == ({"gemma_4", *OPENS} & set(sources())) - found_refused(case)


def found_refused(case: str) -> set[str]:
    """Those refused, and DeepSeek's behind a result, which begins no thought."""
    behind = {"deepseek_v3", "trl deepseekv3"} if case == "result" else set()
    return differences()[case]["refused"] | behind


def test_a_thought_of_a_field_is_put_back_where_the_template_takes_it_out() -> None:
    assert differences()["thought"]["thought"] == OPENS & set(sources())


def test_a_thought_in_a_text_is_that_of_a_field_where_the_template_writes_thoughts() -> (
    None
):
    field, text = differences()["thought"], differences()["thought in the text"]
    assert {"gpt_oss", "qwen3", "nemotron_3"} <= field[""] <= text[""]
    assert field["end"] == text["end"]


def test_few_are_refused_without_tools_and_thoughts() -> None:
    for case in ("plain", "blanks", "history"):
        assert not differences()[case]["refused"]
    # Gemma 2 takes no system turn.
    assert differences()["system"]["refused"] <= {"gemma_2", "trl gemma"}
    calls = differences()["call"]
    assert {"llama_3_1", "qwen2_5", "gpt_oss"} <= calls[""]
    assert calls["id"] <= {"mistral_v3"}
