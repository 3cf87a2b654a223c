"""What holds of the templates of real models: scaffold, response, calls, thoughts, history."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.language_model.model import generation
from pl_pointwise.tasks.language_model.model.generation import (
    Generation,
    generate_answers,
)
from pl_pointwise.tasks.language_model.text.conversations import ConversationEncoder
from pl_pointwise.tasks.language_model.text.messages import parts_of
from pl_pointwise.tasks.language_model.text.reasoning import is_refusal
from pl_pointwise.tasks.language_model.text.records import Record, Response
from tests.tasks.conftest import CHAT_TEMPLATE, build_model, build_tokenizer

FOLDER = Path(__file__).parent / "templates"
REFUSAL = "I'm sorry, but I cannot help with that."
ASKED = [{"role": "user", "content": "Hi"}]
CALL = {"name": "add", "arguments": {"a": 1}}
TOOL = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {}},
}
DEEPSEEK = "<｜end▁of▁sentence｜>"
CLOSED = "<think>\n\n</think>\n\n"

SPECIAL = re.compile(
    r"<\|[A-Za-z_]+\|>|<\|[a-z_]+>|<[a-z_]+\|>|<｜[^｜>]+｜>|<(?:start|end)_of_turn>|\[/?[A-Z_]{3,}\]|<sop>"
)
LLAMA = ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>")
QWEN = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"

# by template: what the prompt of a text ends in, what ends the response
WRITTEN = {
    **dict.fromkeys(
        ["deepseek_r1", "deepseek_v3"], (f"<｜Assistant｜>{CLOSED}", DEEPSEEK)
    ),
    **dict.fromkeys(
        ["gemma_2", "gemma_3"], ("<start_of_turn>model\n", "<end_of_turn>")
    ),
    "glm_4_5": ("<|assistant|>\n<think></think>\n", "<|endoftext|>"),
    "gpt_oss": ("<|start|>assistant<|channel|>final<|message|>", "<|return|>"),
    **dict.fromkeys(["llama_3", "llama_3_1", "llama_3_2"], LLAMA),
    "mistral_v3": ("[INST]Hi[/INST]", "</s>"),
    "qwen2_5": ("<|im_start|>assistant\n", "<|im_end|>"),
    **dict.fromkeys(
        ["qwen3", "qwq"], (f"<|im_start|>assistant\n{CLOSED}", "<|im_end|>")
    ),
    # of the shape of a family:
    "command_a": (
        "<|CHATBOT_TOKEN|><|START_RESPONSE|>",
        "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
    ),
    "gemma_4": ("<|turn>model\n<|channel>thought\n<channel|>", "<turn|>"),
    "glm_4_7": ("<|assistant|></think>", "<|endoftext|>"),
    "nemotron_3": ("<|im_start|>assistant\n<think></think>", "<|im_end|>"),
}
END = {name: closing[closing.rindex("<") :] for name, (_, closing) in WRITTEN.items()}
END |= dict.fromkeys(["gemma_2", "gemma_3"], "<eos>")
ALL = sorted(WRITTEN)
THINKING = [
    *(
        "deepseek_r1",
        "deepseek_v3",
        "glm_4_5",
        "glm_4_7",
        "gpt_oss",
        "nemotron_3",
        "qwen3",
        "qwq",
    )
]

# by template: what a call is written as behind the prompt; None: it is refused
CALLS = {
    **dict.fromkeys(["deepseek_r1", "gemma_2", "gemma_3", "llama_3"]),
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n",
    "glm_4_5": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "gpt_oss": ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
    **dict.fromkeys(
        ["llama_3_1", "llama_3_2"], '{"name": "add", "parameters": {"a": 1}}'
    ),
    "mistral_v3": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "call00000"}]',
    **dict.fromkeys(["qwen2_5", "qwen3"], QWEN),
    "command_a": '<|START_THINKING|><|END_THINKING|><|START_ACTION|>[{"tool_name": "add", '
    '"parameters": {"a": 1}}]<|END_ACTION|><|END_OF_TURN_TOKEN|>',
    "gemma_4": '<|tool_call>call:add{"a": 1}<tool_call|><turn|>',
    "glm_4_7": '<tool_call>add{"a": 1}</tool_call><|endoftext|>',
    "nemotron_3": '\n<tool_call>\n<function=add>{"a": 1}</function>\n</tool_call><|im_end|>',
    "qwq": f"\n{QWEN}<|im_end|>",
}
CALLING = [name for name in ALL if CALLS[name]]
BOTH = {"content": "Let me add.", "tool_calls": [CALL]}
SYSTEM = {"role": "system", "content": "Be kind."}
MARKED = "Write `</think>` to end a thought, then the answer."


@cache
def encoder(name: str, **arguments: Any) -> ConversationEncoder:
    tokenizer: PreTrainedTokenizerFast = build_tokenizer()
    (path,) = FOLDER.rglob(f"{name}.jinja")
    tokenizer.chat_template = path.read_text(encoding="utf-8")
    others = sorted({*SPECIAL.findall(tokenizer.chat_template)} - {END[name]})
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": END[name]})
    tokenizer.add_special_tokens({"additional_special_tokens": others})
    return ConversationEncoder(tokenizer, template_arguments=arguments or None)


def asked(answers: Any = (), messages=ASKED, tools=()) -> Record:
    responses = tuple(Response("reference", answer) for answer in answers)
    return Record(messages, tools, responses, "here")


def rendered(
    name: str, answer: Any, messages=ASKED, tools=(), **arguments: Any
) -> tuple[str, str]:
    prompt, (response,) = encoder(name, **arguments).texts(
        asked([answer], messages, tools)
    )
    return prompt, response


def rendered_or_why(name: str, answer: Any, messages=ASKED) -> tuple[str, str]:
    """As rendered(); of a record that is refused ("", why)."""
    try:
        return rendered(name, answer, messages)
    except DataError as error:
        return "", str(error)


@pytest.mark.parametrize("name", ALL)
def test_what_stands_in_front_of_every_answer_belongs_to_the_prompt(name) -> None:
    opening, closing = WRITTEN[name]
    made = encoder(name)
    prompt, response = rendered(name, REFUSAL)
    assert prompt.endswith(opening)
    assert response == REFUSAL + closing
    assert made.characters(response) == len(REFUSAL)
    # The same where no answer is known, from which is generated.
    assert made.texts(asked())[0] == prompt


@pytest.mark.parametrize("name", ["qwen3", "glm_4_5"])
def test_template_arguments_reach_the_template(name) -> None:
    """Without thinking the template itself writes the empty thought, and nothing stands twice."""
    prompt, response = rendered(name, REFUSAL, enable_thinking=False)
    assert prompt.count("</think>") == 1
    assert prompt.endswith(WRITTEN[name][0])
    assert response == REFUSAL + WRITTEN[name][1]
    assert ("/nothink" in prompt) == (name == "glm_4_5")


@pytest.mark.parametrize("name", CALLING)
def test_a_tool_call_is_behind_the_same_prompt_as_a_text(name) -> None:
    made = encoder(name)
    prompt, (call, text) = made.texts(asked([[CALL], REFUSAL]))
    assert call.startswith(CALLS[name])
    assert REFUSAL in text
    ((_, (ids, _)),) = made.encode([prompt], [[call, text]])
    assert ids[-1] in made.end_ids  # or generation would run on behind a call


@pytest.mark.parametrize("name", THINKING)
def test_an_answer_with_a_thought_is_not_behind_an_empty_one(name) -> None:
    answer = {"content": REFUSAL, "reasoning_content": "A lock is theirs."}
    prompt, response = rendered(name, answer)
    assert "</think>" not in prompt
    assert "final" not in prompt.rpartition("assistant")[2]
    assert response.index("A lock is theirs.") < response.index(REFUSAL)
    assert is_refusal(
        encoder(name).tokenizer.decode(
            encoder(name).encode([""], [[response]])[0][1][0]
        )
    )
    assert (
        rendered(name, f"<think>\nA lock is theirs.\n</think>\n\n{REFUSAL}")[1]
        == response
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *(
            (name, "leaves out the thought")
            for name in sorted({*ALL} - {*THINKING, "gemma_4"})
        ),
        *(
            (name, "no room with enable_thinking=false")
            for name in ("qwen3", "glm_4_7", "gemma_4")
        ),
    ],
)
def test_a_thought_that_a_template_would_lose_is_refused(name, said) -> None:
    arguments = {"enable_thinking": False} if "room" in said else {}
    with pytest.raises(DataError, match=f"here: .*{said}"):
        rendered(name, {"content": "Yes", "reasoning_content": "So"}, **arguments)


CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "question": (ASKED, []),
    "system": ([SYSTEM, *ASKED], []),
    "history": ([*ASKED, {"role": "assistant", "content": "Hello."}, *ASKED], []),
    "tools": (ASKED, [TOOL]),
}
TOOLLESS = {n for n, form in CALLS.items() if form is None} | {"deepseek_v3"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in ALL
        for kind in CONVERSATIONS
        if (name, kind) != ("gemma_2", "system")
        and not (kind == "tools" and name in TOOLLESS)
    ],
)
def test_prompt_and_response_are_the_tokens_of_the_whole(name, kind) -> None:
    """So no seam is within a special token; and only the last token of a response ends it."""
    made, (messages, tools) = encoder(name), CONVERSATIONS[kind]
    answers = [REFUSAL, "e", 'One.\n\nTwo {b}: "c"', [CALL]]
    for answer in answers if CALLS[name] else answers[:3]:
        prompt, response = rendered(name, answer, messages, tools)
        ((prompt_ids, (ids,)),) = made.encode([prompt], [[response]])
        whole = made.tokenizer(prompt + response, add_special_tokens=False).input_ids
        assert prompt_ids + ids == whole
        assert [each in made.end_ids for each in ids] == [False] * (len(ids) - 1) + [
            True
        ]
        if isinstance(answer, str):
            assert response[: made.characters(response)].endswith(answer)
        if kind == "question":  # the same alone
            assert response.endswith(WRITTEN[name][1]) or not isinstance(answer, str)


@pytest.mark.parametrize("name", ["command_a", "gpt_oss", "qwen3"])
def test_with_tools_the_choice_between_text_and_call_is_in_the_response(name) -> None:
    texts = {rendered(name, answer, ASKED, [TOOL]) for answer in (REFUSAL, [CALL])}
    (prompt,) = {prompt for prompt, _ in texts}
    assert prompt.endswith(("<|CHATBOT_TOKEN|>", "<|start|>assistant", CLOSED))


def test_a_system_turn_within_the_last_users_is_in_the_prompt() -> None:
    prompt, response = rendered("mistral_v3", REFUSAL, [SYSTEM, *ASKED])
    assert (prompt, response) == ("<s>[INST]Be kind.\n\nHi[/INST]", f"{REFUSAL}</s>")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "answer", ["First I add.\n</think>\n\nFour.", MARKED, "a{end}b"]
)
def test_an_answer_is_whole_in_the_response_or_refused(name, answer) -> None:
    answer = answer.format(end=END[name])
    ends_inside, thinks = answer.startswith("a"), name in THINKING
    prompt, response = rendered_or_why(name, answer)
    if not prompt:
        reasons = "leaves out the (text|thought) of an answer|no room with|at which the model's"
        assert re.match(f"here: .*({reasons})", response)
        assert thinks or ends_inside or name in ("command_a", "gemma_4")
        return
    assert not ends_inside
    if answer != MARKED and thinks:
        end = "</think>" if name != "gpt_oss" else r"<\|end\|>.*final<\|message\|>"
        assert re.search(rf"First I add\.\n?{end}\n*Four\.", response)
        assert "</think>" not in prompt
    else:
        assert answer in response


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "roles", [["developer"], ["system", "system"], ["system", "developer"]]
)
def test_every_turn_is_in_the_prompt_or_the_record_is_refused(name, roles) -> None:
    turns = [
        {"role": role, "content": f"ZZ{place}"} for place, role in enumerate(roles)
    ]
    prompt, why = rendered_or_why(name, REFUSAL, [*turns, *ASKED])
    if prompt:
        assert all(turn["content"] in prompt for turn in turns)
        assert name not in ("glm_4_7", "qwq") or roles == ["system", "system"]
    else:
        assert re.match(
            "here: the chat template (leaves out a turn of role|refuses)", why
        )


@pytest.mark.parametrize("name", sorted({*THINKING} - {"gpt_oss"}))
def test_answers_with_and_without_a_thought_share_a_prompt(name) -> None:
    made, thought = encoder(name), {"content": "Four.", "reasoning_content": "I add."}
    prompt, responses = made.texts(asked([thought, REFUSAL]))
    for answer, response in zip((thought, REFUSAL), responses, strict=True):
        assert (prompt + response).count("</think>") == 1
        assert response.endswith(parts_of(answer).text + made.closing)


def test_thoughts_of_earlier_turns_may_be_left_out() -> None:
    said = {"role": "assistant", "content": "Hello.", "reasoning_content": "Who is it?"}
    prompt, _ = rendered("qwen3", REFUSAL, [*ASKED, said, *ASKED])
    assert "Who is it?" not in prompt


@pytest.mark.parametrize(
    ("names", "answer", "tools", "said"),
    [
        (TOOLLESS, REFUSAL, [TOOL], "a tool"),
        (["llama_3_1", "mistral_v3"], BOTH, [], "the text of an answer"),
    ],
)
def test_what_a_template_leaves_out_is_refused(names, answer, tools, said) -> None:
    for name in names:
        with pytest.raises(
            DataError, match=f"here: the chat template leaves out {said}"
        ):
            rendered(name, answer, ASKED, tools)


@pytest.mark.parametrize("name", sorted({*ALL} - {*CALLING}))
def test_calls_for_which_a_template_has_no_form_are_refused(name) -> None:
    """Also where the text beside them has all of their words."""
    for answer, messages in (([CALL], ASKED), (BOTH, ASKED), (REFUSAL, HISTORY)):
        with pytest.raises(
            DataError, match=r"here: .* has no form for tool calls.* chat_template"
        ):
            rendered(name, answer, messages)


@pytest.mark.parametrize(
    "name", ["deepseek_v3", "glm_4_5", "gpt_oss", "qwen2_5", "qwen3"]
)
def test_an_answer_of_text_and_call_keeps_both(name) -> None:
    _, response = rendered(name, BOTH)
    assert "Let me add." in response
    assert "add" in response.partition("Let me add.")[2]


@pytest.mark.parametrize("name", CALLING)
def test_several_calls_are_all_written_or_refused(name) -> None:
    """gpt-oss's template writes the first and drops the others."""
    calls = [CALL, CALL | {"name": "subtract"}]
    if name in ("gpt_oss", "llama_3_1", "llama_3_2"):
        with pytest.raises(
            DataError, match=r"here: .*(at most 1 tool call|single tool-call)"
        ):
            rendered(name, calls)
    else:
        response = rendered(name, calls)[1]
        assert "subtract" in response.partition("add")[2]


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "1 + 0?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": CALL}],
    },
    {"role": "tool", "content": "It makes 1."},
]


@pytest.mark.parametrize("name", CALLING)
@pytest.mark.parametrize("thanks", [False, True])
def test_calls_and_results_of_earlier_turns_stay(name, thanks) -> None:
    """With a result last, and with a user's turn behind it."""
    messages = HISTORY
    if thanks:
        turns = [
            {"role": "assistant", "content": "One."},
            {"role": "user", "content": "And?"},
        ]
        messages = [*HISTORY, *turns]
    prompt, response = rendered(name, REFUSAL, messages)
    assert "It makes 1." in prompt
    head = prompt.partition("It makes 1.")[0]
    assert ("add" in head and '"a"' in head) or "<arg_key>a" in head
    assert REFUSAL in response
    # Beside the choice of a call, which DeepSeek's template does not write behind a result.
    assert REFUSAL in rendered(name, REFUSAL, messages, [TOOL])[1]


def test_a_call_of_which_an_argument_is_lost_is_refused() -> None:
    tokenizer: PreTrainedTokenizerFast = build_tokenizer()
    of = "(call.function or call)"
    few = CHAT_TEMPLATE.replace(
        f"{of} | tojson", f"{of}.name + ({of}.arguments.x or '')"
    )
    tokenizer.chat_template, call = few, CALL | {"arguments": {"total": 1}}
    with pytest.raises(
        DataError, match=r"leaves out a tool call of an answer.*'total'"
    ):
        ConversationEncoder(tokenizer).texts(asked([[call]]))


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.parametrize("said", [REFUSAL, f"<think>\nMaybe.\n</think>\n\n{REFUSAL}"])
def test_a_perfect_refusal_counts_as_one(name, said, monkeypatch) -> None:
    """With a thought that the model writes in spite of the scaffold, too."""
    made = encoder(name)
    if name == "gpt_oss" and said != REFUSAL:
        final = "<|start|>assistant<|channel|>final<|message|>"
        said = f"<|channel|>analysis<|message|>Maybe.<|end|>{final}{REFUSAL}"
    ids = made.tokenizer(said + made.closing, add_special_tokens=False).input_ids
    monkeypatch.setattr(generation, "generate_ids", lambda *a, **k: [ids] * 2)
    prompts = [made.texts(asked())[0]] * 2
    # A thought that goes on and never ends is none.
    if name == "deepseek_v3" and said == REFUSAL:
        prompts[1] = rendered(name, {"content": "x", "reasoning_content": "y"})[0]
    encoded = [ids for ids, _ in made.encode(prompts, [[], []])]
    answers = generate_answers(build_model("llama"), made, encoded, Generation())
    texts = [answer["answer"] for answer in answers]
    assert texts == [REFUSAL, "" if prompts[0] != prompts[1] else REFUSAL]
    assert is_refusal(said)
