"""Each row of the families' tables names a model whose template it takes first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pl_pointwise.tasks.language_model.text.reasoning import empty_thought
from pl_pointwise.tasks.language_model.text.template_families import (
    CALLS_ARE,
    HELLO,
    PROBE,
    PROMPTS_END,
    THOUGHTS_STAND,
    Asked,
    PromptProbe,
)
from pl_pointwise.tasks.language_model.text.template_source import marks_in
from pl_pointwise.tasks.language_model.text.template_traits import Traits
from tests.tasks.language_model.text.test_asked_of_templates import (
    IN_SOURCE,
    PLAIN,
    STRIPPED,
    template,
)
from tests.tasks.language_model.text.test_asked_of_templates import (
    encoder as encoder_of_source,
)
from tests.tasks.language_model.text.test_templates import encoder

OF_SHAPE = {
    "SmolLM3": IN_SOURCE + template(PLAIN),
    "DeepSeek-R1-0528": template(STRIPPED),
}


def traits_of(name: str) -> Traits:
    if name in OF_SHAPE:
        return encoder_of_source(OF_SHAPE[name]).traits
    return encoder(name).traits


def first(rows: Sequence[Any], fits: Any) -> str:
    """The models of the first row that fits; "" of none."""
    return next((row.seen_with for row in rows if fits(row)), "")


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("qwen3", "Qwen3"),
        ("glm_4_5", "GLM-4.5"),
        ("gpt_oss", "gpt-oss"),
        ("nemotron_3", "Nemotron 3"),
        ("deepseek_v3", "DeepSeek-V3"),
        ("deepseek_r1", "DeepSeek-R1's"),
        ("qwq", "QwQ"),
        ("SmolLM3", "SmolLM3"),
        ("DeepSeek-R1-0528", "DeepSeek-R1-0528"),
        ("qwen2_5", ""),
        ("llama_3", ""),
    ],
)
def test_thoughts_stand_where_the_row_of_the_model_says(name: str, model: str) -> None:
    traits = traits_of(name)
    asked = Asked(
        traits.template,
        traits.template.render(HELLO),
        traits.behind_text.closing,
        marks_in(traits.template.source),
    )
    seen_with = first(THOUGHTS_STAND, lambda row: row.form(asked) is not None)
    assert model in seen_with
    assert bool(model) is bool(seen_with)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("qwen2_5", "Qwen2.5"),
        ("llama_3_1", "Llama 3.1"),
        ("mistral_v3", "Mistral"),
        ("gpt_oss", "gpt-oss"),
        ("deepseek_v3", "DeepSeek-V3"),
        ("gemma_3", ""),
    ],
)
def test_calls_are_what_the_row_of_the_model_says(name: str, model: str) -> None:
    calls = traits_of(name).template.calls

    def is_it(row: Any) -> bool:
        ids = row.form.ids == calls.ids
        return ids and row.form.arguments_as_text == calls.arguments_as_text

    seen_with = first(CALLS_ARE, is_it) if calls.at_most else ""
    assert model in seen_with
    assert bool(model) is bool(seen_with)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("llama_3", "Llama 3"),
        ("qwen3", "Qwen3"),
        ("command_a", "Command A"),
        ("deepseek_r1", "R1"),
        ("qwq", "QwQ"),
        ("gemma_4", "Gemma 4"),
        ("nemotron_3", "Nemotron 3"),
        ("glm_4_7", "GLM-4.7"),
    ],
)
def test_a_prompt_ends_where_the_row_of_the_model_says(name: str, model: str) -> None:
    traits = traits_of(name)
    base = traits.template.render(HELLO)
    head = traits.template.render(HELLO, PROBE).rpartition(PROBE.text)[0]
    thought, closing = empty_thought(base, traits.thoughts)
    probe = PromptProbe(base, head, head, thought, closing, traits.thoughts)
    assert model in first(PROMPTS_END, lambda row: row.fits(probe))
