"""A prompt that is too long is refused by name, or left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.language_model.data import EncodedResponses
from pl_pointwise.tasks.language_model.text.conversations import ConversationEncoder
from pl_pointwise.tasks.language_model.text.records import Record, Response
from tests.tasks.conftest import build_tokenizer


def plain(text: str) -> Record:
    turns = [{"role": "user", "content": text}]
    return Record(turns, [], (Response("prefer", "Yes."),), "f.jsonl, line 7")


def test_too_long_is_an_error_by_name_or_a_gap() -> None:
    encoder = ConversationEncoder(build_tokenizer())
    long, fits = plain("a very long question"), plain("short")
    limit = len(encoder.encode([encoder.texts(fits)[0]], [[]])[0][0])
    options: dict[str, Any] = {"max_prompt_length": limit, "max_length": 2000}
    with pytest.raises(
        DataError, match=r"f.jsonl, line 7: the prompt has .*invalid: skip"
    ):
        EncodedResponses([long, fits], encoder, **options, skip_invalid=False)
    with pytest.warns(
        UserWarning, match=r"left out 1 of 2 .*f.jsonl, line 7: the prompt has"
    ):
        kept = EncodedResponses([long, fits], encoder, **options, skip_invalid=True)
    assert kept.records == [fits]
    # What the model has positions for, of a prompt alone too.
    options |= {"max_length": limit - 1}
    with pytest.raises(
        DataError, match=r"line 7: a response of 1 .*positions, are .*shorten the"
    ):
        EncodedResponses([replace(fits, responses=())], encoder, **options)
