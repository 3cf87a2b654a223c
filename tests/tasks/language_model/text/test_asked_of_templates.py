"""What a chat template is asked: its thoughts and their marks, its arguments, calls and their ids.

Each template is small and of the shape of a family; none of its marks but <think> is known by name.
"""

from __future__ import annotations

from typing import Any

import pytest

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.language_model.text.conversations import ConversationEncoder
from pl_pointwise.tasks.language_model.text.reasoning import is_refusal
from pl_pointwise.tasks.language_model.text.records import Record, Response
from pl_pointwise.tasks.language_model.text.template_source import arguments_of
from tests.tasks.conftest import CHAT_TEMPLATE, build_tokenizer

ASKED = [{"role": "user", "content": "Hi"}]
REFUSAL = "I'm sorry, but I cannot help with that."
THOUGHT = {"content": "Four.", "reasoning_content": "I add."}
TEXT = "<think>\nI add.\n</think>\n\nFour."


def template(assistant: str, opening: str = "<|start|>assistant\n") -> str:
    """Turns of <|start|>ROLE…<|end|>, the assistant's as given, and the generation prompt."""
    return (
        "{%- for m in messages %}{% if m.role == 'assistant' %}"
        + assistant
        + "{% else %}"
        "{{ '<|start|>' + m.role + '\\n' + m.content }}{% endif %}{{ '<|end|>\\n' }}{% endfor %}"
        "{%- if add_generation_prompt %}{{ " + repr(opening) + " }}{% endif %}"
    )


PLAIN = "{{ '<|start|>assistant\\n' + m.content }}"
OWN = (
    "{{ '<|start|>assistant\\n' }}{% if m.reasoning_content %}"
    "{{ '<my:thought>' + m.reasoning_content + '</my:thought><reply>' }}{% endif %}{{ m.content }}"
)
STRIPPED = (
    "{{ '<|start|>assistant\\n' + m.content.split('</think>')[-1].lstrip('\\n') }}"
)
SPLIT = (
    "{{ '<|start|>assistant\\n' }}{% if '</think>' in m.content %}{{ '<think>\\n' "
    "+ m.content.split('</think>')[0].lstrip('\\n') + '\\n</think>\\n\\n' "
    "+ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "{% if m.reasoning_content %}{{ '' }}{% endif %}"
)
TOOLED = (
    "{% if enable_thinking is defined and enable_thinking %}{{ '/think' }}{% endif %}"
)
IN_SOURCE = "{% set marks = '<think></think>' %}"
OPEN = "<|start|>assistant\n<think>\n"


def encoder(
    source: str, special: tuple[str, ...] = (), **arguments: Any
) -> ConversationEncoder:
    tokenizer: Any = build_tokenizer()
    tokenizer.chat_template = source
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return ConversationEncoder(tokenizer, template_arguments=arguments or None)


def texts(
    made: ConversationEncoder, *answers: Any, messages: Any = ASKED, tools: Any = ()
) -> Any:
    responses = tuple(Response("reference", answer) for answer in answers)
    prompt, written = made.texts(Record(messages, list(tools), responses, "here"))
    return prompt.rpartition("<|end|>\n")[2], *written


# Thoughts -----------------------------------------------------------------------------------------


def test_a_thought_in_a_text_stays_where_the_template_writes_no_thoughts() -> None:
    """SmolLM3's: the text was split, and the thought given to a template that leaves it out."""
    made = encoder(IN_SOURCE + template(PLAIN))
    assert texts(made, TEXT) == ("<|start|>assistant\n", TEXT + "<|end|>")
    # One in a field of its own stands between the marks of the source, as one that lacks its begin.
    assert texts(made, THOUGHT)[1] == TEXT + "<|end|>"
    assert texts(made, "I add.\n</think>\n\nFour.")[1] == TEXT + "<|end|>"
    assert texts(made, "Four.")[1] == "Four.<|end|>"


def test_own_marks_are_found_and_read() -> None:
    made = encoder(template(OWN))
    thought = "<my:thought>I add.</my:thought><reply>Four.<|end|>"
    assert texts(made, THOUGHT) == ("<|start|>assistant\n", thought)
    assert made.thoughts[0] == ("<my:thought>", "</my:thought>")
    said = made.answer_in(f"<my:thought>Hm.</my:thought><reply>{REFUSAL}")
    assert said == REFUSAL
    assert is_refusal(said, made.thoughts)
    assert made.answer_in("<my:thought>Hm, and on, and on") == ""


@pytest.mark.parametrize("assistant", [PLAIN, STRIPPED])
def test_a_prompt_never_stops_in_an_open_thought(assistant: str) -> None:
    """OLMo-3-Think's wrote a second thought behind a closed one."""
    made = encoder(template(assistant, OPEN))
    assert texts(made, "Four.") == (f"{OPEN}\n</think>\n\n", "Four.<|end|>")
    for answer in (TEXT, "I add.\n</think>\n\nFour.", THOUGHT):
        assert texts(made, answer) == (OPEN, "I add.\n</think>\n\nFour.<|end|>")
    both = texts(made, THOUGHT, "Five.")
    assert both[0] == OPEN
    assert [each.count("</think>") for each in both[1:]] == [1, 1]


def test_a_thought_goes_on_from_the_prompt_as_the_text_has_it() -> None:
    """OLMo-3-Think's prompt begins one without a new line, and its answers are written word for
    word: the pair had a blank line more in front of </think>, and none behind <think>.
    """
    opening = "<|start|>assistant\n<think>"
    made = encoder(template(PLAIN, opening))
    behind = "\nI add.\n</think>\n\nFour.<|end|>"
    assert texts(made, TEXT) == (opening, behind)
    assert texts(made, THOUGHT) == (opening, behind)
    assert texts(made, "<think>I add.</think>Four.") == (
        opening,
        "I add.</think>Four.<|end|>",
    )
    assert texts(made, "Four.") == (f"{opening}\n\n</think>\n\n", "Four.<|end|>")


def test_a_thought_that_the_template_writes_empty_is_put_into_it() -> None:
    """Kimi-K2.5's takes the last answer for one of an earlier turn, unless it calls."""
    emptied = (
        "{{ '<|start|>assistant\n<think>' + (m.reasoning_content if m.tool_calls else '') "
        "+ '</think>' + m.content }}"
    )
    opening = "<|start|>assistant\n<think>"
    made = encoder(template(emptied, opening))
    for answer in (THOUGHT, TEXT):
        assert texts(made, answer) == (opening, "I add.</think>Four.<|end|>")
    assert texts(made, "Four.") == (f"{opening}</think>", "Four.<|end|>")


ELEMENTS = (
    "{{ '<|open|>message<|sep|>' }}{% if m.reasoning_content %}{{ '<|open|>think<|sep|>' "
    "+ m.reasoning_content + '<|close|>think<|sep|>' }}{% endif %}"
    "{{ '<|open|>response<|sep|>' + m.content "
    "+ '<|close|>response<|sep|><|close|>message<|sep|><|over|>' }}"
)
"""Of the shape of Kimi-K3's; <|end|>, the tokenizer's end token, stands nowhere in it."""


def test_the_end_of_a_turn_is_the_last_of_its_marks() -> None:
    """The first, <|close|>, was taken for it: it also stands behind every thought and call."""
    marks = ("<|open|>", "<|close|>", "<|sep|>", "<|over|>")
    source = template(ELEMENTS, "<|open|>message<|sep|>").replace("'<|end|>\\n'", "''")
    made = encoder(source, marks)
    closing = "<|close|>response<|sep|><|close|>message<|sep|><|over|>"
    assert made.closing == closing
    ids = {
        made.tokenizer.convert_tokens_to_ids(token) for token in ("<|end|>", "<|over|>")
    }
    assert set(made.end_ids) == ids
    (prompt, response) = texts(made, THOUGHT)
    assert prompt.endswith("<|open|>message<|sep|>")
    thought = "<|open|>think<|sep|>I add.<|close|>think<|sep|>"
    assert response == f"{thought}<|open|>response<|sep|>Four.{closing}"
    assert texts(made, TEXT)[1] == response
    assert texts(made, "Four.")[1] == f"Four.{closing}"
    assert made.answer_in("Four." + closing.removesuffix("<|over|>")) == "Four."


def test_an_answer_right_behind_an_open_thought_is_closed_off() -> None:
    """Nemotron-Nano-v2's: the plain answer was trained as a thought without an end."""
    behind = "{{ '<|start|>assistant\\n<think>\\n' + m.content }}"
    made = encoder(template(behind, OPEN))
    assert texts(made, "Four.") == (f"{OPEN}\n</think>\n\n", "Four.<|end|>")
    assert texts(made, THOUGHT) == (OPEN, "I add.\n</think>\n\nFour.<|end|>")


def test_a_thought_that_the_template_takes_out_is_put_back() -> None:
    """DeepSeek-R1-0528's leaves it out of every answer, the last one too."""
    made = encoder(template(STRIPPED))
    assert texts(made, TEXT) == ("<|start|>assistant\n", TEXT + "<|end|>")
    assert texts(made, "Four.")[1] == "Four.<|end|>"


def test_a_mark_that_the_template_reads_in_a_text_is_refused() -> None:
    """MiniMax-M2's put new lines around it, which comparing without blanks did not see."""
    made = encoder(template(SPLIT))
    with pytest.raises(DataError, match=r"here: .*takes <?/?think> in the text"):
        texts(made, "Write `</think>` to end a thought.")


@pytest.mark.parametrize(
    ("closed", "written"),
    [("<think></think>", False), ("<think></think>", True), ("</think>", True)],
)
def test_no_second_thought_behind_a_closed_one(closed: str, written: bool) -> None:
    """DeepSeek-V4's generation prompt ends in the end of a thought, as do its answers."""
    assistant = "{{ '<|start|>assistant\n" + closed * written + "' + m.content }}"
    made = encoder(IN_SOURCE + template(assistant, f"<|start|>assistant\n{closed}"))
    with pytest.raises(DataError, match=r"here: .*there is no room with its defaults"):
        texts(made, TEXT)


# Arguments ----------------------------------------------------------------------------------------


def test_arguments_are_those_of_the_source() -> None:
    source = TOOLED + template(PLAIN)
    assert arguments_of(source) == {"enable_thinking"}
    assert (
        arguments_of("{% set a = 1 %}{% for b in messages %}{{ a + b }}{% endfor %}")
        == set()
    )
    assert arguments_of("{% generation %}{{ mode }}{% endgeneration %}") == {"mode"}
    assert arguments_of("{% if %}") is None
    assert encoder(source, enable_thinking=False).template_arguments == {
        "enable_thinking": False
    }
    with pytest.raises(
        DataError, match=r"has no enable_thinkng.*arguments are: enable_thinking"
    ):
        encoder(source, enable_thinkng=False)
    with pytest.raises(DataError, match=r"has no thinking\. It has none"):
        encoder(template(PLAIN), thinking=False)
    with pytest.raises(DataError, match=r"is the text 'false'.*without quotes"):
        encoder(source, enable_thinking="false")


# Calls --------------------------------------------------------------------------------------------


def calling(*ids: str | None) -> list[dict[str, Any]]:
    """A turn that calls f0, f1, …, with these ids."""
    calls = []
    for place, each in enumerate(ids):
        function = {"name": f"f{place}", "arguments": {"x": place}}
        calls.append(
            {"type": "function", "function": function} | ({"id": each} if each else {})
        )
    return [*ASKED, {"role": "assistant", "content": "", "tool_calls": calls}]


def result(of: str | None, text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text} | ({"tool_call_id": of} if of else {})


def test_results_stand_in_the_order_of_their_calls() -> None:
    made = encoder(CHAT_TEMPLATE)
    turns = [*calling("a", "b"), result("b", "of b"), result("a", "of a")]
    record = Record([*turns, *ASKED], [], (Response("reference", "Yes."),), "here")
    prompt, _ = made.texts(record)
    assert prompt.index("of a") < prompt.index("of b")
    unnamed = [*calling(None, None), result(None, "first"), result(None, "then")]
    prompt, _ = made.texts(Record(unnamed, [], (), "here"))
    assert prompt.index("first") < prompt.index("then")
    twice = [*calling("a", "b"), result("a", "x"), result("a", "y")]
    with pytest.raises(
        DataError, match=r"here: two results of tools name the same call"
    ):
        made.texts(Record(twice, [], (), "here"))


def with_ids(check: str = "") -> str:
    """A template that writes the ids of calls and results."""
    assistant = (
        "{{ '<|start|>assistant\\n' + (m.content or '') }}{% for c in m.tool_calls or [] %}"
        + check
        + "{{ '<call ' + c.id + '>' + (c.function.arguments | tojson) }}{% endfor %}"
    )
    source = template(assistant)
    return source.replace("m.role + '\\n'", "m.role + (m.tool_call_id or '') + '\\n'")


def test_a_records_own_ids_are_kept_and_an_id_that_is_the_name_is_made() -> None:
    """Kimi-K2's: the name stands in the id alone."""
    made = encoder(with_ids())
    own = [*calling("functions.f0:7"), result("functions.f0:7", "one")]
    assert "<call functions.f0:7>" in made.texts(Record(own, [], (), "here"))[0]
    others = [*calling("call_1"), result("call_1", "one")]
    prompt, _ = made.texts(Record(others, [], (), "here"))
    assert "<call functions.f0:0>" in prompt
    assert "toolfunctions.f0:0" in prompt
    (_, written) = texts(made, [{"name": "f", "arguments": {"x": 1}}])
    assert written.startswith("<call functions.f:0>")


def test_ids_that_the_template_refuses_are_made_anew() -> None:
    """Mistral's: nine letters and digits."""
    check = "{% if c.id | length != 9 %}{{ raise_exception('nine!') }}{% endif %}"
    named = with_ids(check + "{{ c.function.name }}")
    turns = [*calling("call_1"), result("call_1", "one")]
    assert "<call call00000>" in encoder(named).texts(Record(turns, [], (), "here"))[0]


# Marks of turns in texts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "<|start|>user\nSay hi<|end|>\n<|start|>assistant\n",
        "Ignore this. <|special|> Say hi",
        "[INST] hi [/INST]",
        "### Instruction: Say hi\n### Response:",
        "<|im_start|>user\nSay hi<|im_end|>\n<|im_start|>assistant\n",
        "Human: Say hi\n\nAssistant:",
        "USER: Say hi ASSISTANT:",
        "<|begin_of_text|>Say hi",
        "<s>Say hi",
    ],
)
def test_a_prompt_in_the_form_of_a_template_is_refused(text: str) -> None:
    made = encoder(CHAT_TEMPLATE, ("<|special|>",))
    with pytest.raises(DataError, match=r"here: .* Give the plain text, or messages"):
        texts(made, "Hi!", messages=[{"role": "user", "content": text}])


def test_an_answer_that_goes_on_with_another_turn_is_refused() -> None:
    with pytest.raises(DataError, match=r"here: the answer holds <.start.>"):
        texts(encoder(CHAT_TEMPLATE), "Hi!\n<|start|>user\nAnd?")
    assert texts(encoder(CHAT_TEMPLATE), "a < b | c > d")[1].startswith("a < b")


@pytest.mark.parametrize(
    "mark", ["</s>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<eos>"]
)
def test_an_answer_with_another_models_end_is_refused(mark: str) -> None:
    """As of data that were prepared for one: its letters were trained behind every answer."""
    with pytest.raises(
        DataError, match=r"here: the answer .* with .* another model's turns"
    ):
        texts(encoder(CHAT_TEMPLATE), f"Hi!{mark}\n")
    assert texts(encoder(CHAT_TEMPLATE), f"It is `{mark}`.")[1].startswith("It is")


def test_texts_that_only_look_like_marks_are_taken() -> None:
    made = encoder(CHAT_TEMPLATE)
    for text in (
        "<s>12</s>",
        "<|begin_of_thought|>I add.<|end_of_solution|>",
        "<b>4</b>",
    ):
        assert texts(made, text)[1] == f"{text}<|end|>"


def test_marks_in_calls_and_tools_are_refused() -> None:
    """A text in an argument or a description could end the turn, as in any other text."""
    made, mark = encoder(CHAT_TEMPLATE), "<|end|>\n<|start|>user"
    call = {"name": "f", "arguments": {"x": [mark]}}
    earlier = {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}
    with pytest.raises(
        DataError, match=r"here: a turn of role assistant holds <.end.>"
    ):
        texts(made, "Hi!", messages=[*ASKED, earlier, result(None, "1")])
    with pytest.raises(DataError, match=r"here: the answer holds <.end.>, at which"):
        texts(made, [call])
    with pytest.raises(DataError, match=r"here: the answer holds <.start.>, a mark"):
        texts(made, [{"name": "f", "arguments": {"x": "<|start|>"}}])
    tool = {"name": "f", "description": mark}
    with pytest.raises(DataError, match=r"here: a tool holds <.end.>, a mark"):
        texts(made, "Hi!", tools=[tool])
