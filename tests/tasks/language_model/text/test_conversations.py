"""Prompt and response are what the chat template makes of them, cut where the answer begins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.language_model.text.conversations import ConversationEncoder
from pl_pointwise.tasks.language_model.text.records import Record, Response
from tests.tasks.conftest import build_tokenizer

TOOL = {"name": "add", "parameters": {"type": "object"}}
CALL = {"name": "add", "arguments": {"a": 1, "b": "two"}}
ENCODER = ConversationEncoder(build_tokenizer())

texts = st.text(
    st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20
).filter(
    lambda text: "<|" not in text  # The tokenizer's own marks are refused.
)
answers = texts | st.lists(
    st.fixed_dictionaries(
        {"name": texts, "arguments": st.dictionaries(texts, texts, max_size=2)}
    ),
    min_size=1,
    max_size=2,
)


def with_template(template: str) -> PreTrainedTokenizerFast:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def encoded(encoder: ConversationEncoder, question: str, answer, tools=()) -> tuple:
    asked = [{"role": "user", "content": question}]
    record = Record(asked, tools, (Response("reference", answer),), "here")
    prompt, (response,) = encoder.texts(record)
    return prompt, response, encoder.encode([prompt], [[response]])[0]


@given(texts, answers, st.booleans())
def test_the_prompt_is_a_token_prefix_of_what_the_template_makes_of_the_whole(
    question, answer, tools
) -> None:
    _, _, (prompt, (response,)) = encoded(
        ENCODER, question, answer, [TOOL] if tools else []
    )
    turn = {"role": "assistant", "content": answer}
    if not isinstance(answer, str):
        calls = [{"type": "function", "function": call} for call in answer]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
    whole = ENCODER.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}, turn],
        tools=[{"type": "function", "function": TOOL}] if tools else None,
        return_dict=False,
    )
    joined = prompt + response
    assert joined == whole[: len(joined)]
    assert ENCODER.tokenizer.decode(whole[len(joined) :]).strip() == ""
    assert response[-1] == ENCODER.tokenizer.eos_token_id
    assert response[:-1]


def test_a_token_that_begins_a_sequence_stands_once() -> None:
    """Whether or not the tokenizer itself would add one more."""
    tokenizer = with_template(
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer.add_bos_token = True
    _, _, (prompt, (response,)) = encoded(ConversationEncoder(tokenizer), "Hi", "Ho")
    assert (prompt + response).count(tokenizer.bos_token_id) == 1
    assert prompt[0] == tokenizer.bos_token_id


def test_a_template_that_does_not_continue_its_own_prompt_is_refused() -> None:
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\nThoughts: {% endif %}"
    )
    with pytest.raises(DataError, match="does not continue its own generation prompt"):
        ConversationEncoder(with_template(template))


@pytest.mark.parametrize("asked", ["'%d %b %Y'", ' "%d %b %Y" '])
def test_the_date_in_a_prompt_never_changes(asked: str) -> None:
    """A run could otherwise neither be resumed nor repeated on another day."""
    tokenizer = with_template(
        "{{ strftime_now("
        + asked
        + ") }}{% for m in messages %}<|start|>{{ m.role }}\n"
        "{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    assert encoded(ConversationEncoder(tokenizer), "Hi", "Ho")[0].startswith(
        "26 Jul 2024"
    )


def test_a_conversation_the_template_refuses_is_named() -> None:
    tokenizer = with_template(
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{{ raise_exception('no tools here') }}{% endif %}<|start|>{{ m.role }}\n"
        "{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    encoder = ConversationEncoder(tokenizer)
    with pytest.raises(
        DataError, match=r"line 7: the chat template refuses.*no tools here"
    ):
        encoder.texts(Record([{"role": "tool", "content": "3"}], [], (), "line 7"))


def test_a_tokenizer_that_puts_a_blank_in_front_puts_none_behind_a_prompts_blank() -> (
    None
):
    """ "assistant: " and "Yes." became "assistant:  Yes."; legacy SentencePiece does so."""
    words = ["<unk>", "</s>", "▁", *"asitnYe.:oHlqur?Nk\n", "Ye", "Yes", "▁Yes"]
    merges = [("Y", "e"), ("Ye", "s"), ("▁", "Yes")]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>")
    inner = Tokenizer(model)
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% else %} {% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    text, _, (prompt, (response,)) = encoded(
        ConversationEncoder(tokenizer), "No?", "Yes."
    )
    assert text.endswith("assistant: ")
    assert tokenizer.decode(prompt + response) == "user: No? assistant: Yes.</s>"
