"""Generation: greedy answers in any batch, drawn ones by their seed, and nothing left changed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from pl_pointwise.tasks import Policy, When2CallModule
from pl_pointwise.tasks.language_model.likelihood.batch import collate_responses
from pl_pointwise.tasks.language_model.likelihood.scoring import base_of
from pl_pointwise.tasks.language_model.model.adapters import Lora
from pl_pointwise.tasks.language_model.model.generation import (
    Generation,
    generate_ids,
    precision_of_weights,
)
from tests.tasks.conftest import adapt, build_model, move_adapters

END = 2
GREEDY = Generation(max_new_tokens=9)
DRAWN = Generation(max_new_tokens=9, sample=True, temperature=0.8, top_k=20)


def prompts_of(
    lengths: Sequence[int] = (5, 13, 1, 8), seed: int = 0
) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 90, (n,), generator=generator).tolist() for n in lengths]


def answers(
    model: Any, settings: Generation, ends: Sequence[int] = (END,), **how: Any
) -> Any:
    return generate_ids(model, prompts_of(), settings, ends=ends, **how)


def next_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """By the whole sequence in one forward pass: no cache, no padding."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0, -1]
    return logits


def greedy_by_hand(model: Any, prompt: list[int], ends: Sequence[int]) -> list[int]:
    found: list[int] = []
    while len(found) < 9 and (not found or found[-1] not in ends):
        found.append(int(next_logits(model, prompt + found).argmax()))
    return found


# Answers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "architecture", ["llama", "qwen2", "mistral", "gemma2", "bloom"]
)
def test_greedy_answers_in_a_batch_are_those_of_each_prompt_by_hand(
    architecture,
) -> None:
    """Of models with windows and with ALiBi too: padding must not shift a position."""
    model = build_model(architecture).eval()
    free = [greedy_by_hand(model, prompt, ()) for prompt in prompts_of()]
    ends = [free[1][3]]  # so that at least one answer ends, and early
    expected = [greedy_by_hand(model, prompt, ends) for prompt in prompts_of()]
    assert len(expected[1]) < 9
    assert answers(model, GREEDY, ends) == expected


def test_a_model_in_float32_answers_under_bf16_mixed_as_without_it() -> None:
    """Own answers to keep were other texts than the same model's in evaluation, 11 of 26."""
    model = build_model("llama").eval()
    prompts = prompts_of(range(4, 28, 2))
    long = Generation(max_new_tokens=40)

    def texts(order: Sequence[int], size: int, mixed: bool) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            for start in range(0, len(order), size):
                some = order[start : start + size]
                ids = generate_ids(model, [prompts[i] for i in some], long, ends=(END,))
                found |= dict(zip(some, ids, strict=True))
            assert torch.is_autocast_enabled("cpu") == mixed
        return found

    alone = texts(range(12), 1, mixed=False)
    for order, size in ((range(12), 8), (range(11, -1, -1), 5)):
        assert texts(order, size, mixed=True) == alone


def test_a_base_in_bfloat16_with_adapters_in_float32_answers_under_bf16_mixed() -> None:
    """Without autocast such parts may not fit together."""
    model = adapt(build_model("llama").to(torch.bfloat16), target_modules=["lm_head"])
    assert {weight.dtype for weight in model.parameters()} > {torch.bfloat16}
    with torch.autocast("cpu", torch.bfloat16):
        assert isinstance(precision_of_weights(model), nullcontext)
        assert len(answers(model, GREEDY)) == len(prompts_of())


def test_drawn_answers_depend_on_prompts_and_seed_not_on_what_was_drawn_before() -> (
    None
):
    model = build_model("llama").eval()
    first = answers(model, DRAWN)
    torch.rand(3)
    assert answers(model, DRAWN) == first
    assert answers(model, replace(DRAWN, seed=1)) != first


def test_a_draw_of_the_likeliest_alone_is_greedy() -> None:
    model = build_model("llama").eval()
    one = Generation(max_new_tokens=9, sample=True, top_k=1)
    assert answers(model, one) == answers(model, GREEDY) != answers(model, DRAWN)
    # not only 2.0
    assert answers(model, replace(one, temperature=2)) == answers(model, GREEDY)


@pytest.mark.parametrize("top_k", [0, 5])
def test_draws_follow_the_tempered_distribution_of_the_k_likeliest(top_k) -> None:
    model, number, prompt = build_model("llama").eval(), 4000, prompts_of()[0]
    settings = Generation(max_new_tokens=1, sample=True, temperature=0.7, top_k=top_k)
    drawn = generate_ids(model, [prompt] * number, settings, ends=[END])
    logits = next_logits(model, prompt).double()
    allowed = logits.topk(top_k or len(logits)).indices
    share = torch.zeros_like(logits).scatter(
        0, allowed, (logits[allowed] / 0.7).softmax(0)
    )
    found = torch.tensor(drawn)[:, 0].bincount(minlength=len(logits)) / number
    assert (found - share).abs().max() < 5 * (share.max() / number).sqrt()
    assert found[share == 0].sum() == 0


def test_a_models_own_generation_settings_do_not_apply() -> None:
    model = build_model("llama").eval()
    expected = answers(model, GREEDY), answers(model, DRAWN)
    own = model.generation_config
    own.update(
        top_p=0.01, temperature=0.01, top_k=1, repetition_penalty=9.0, do_sample=True
    )
    own.update(
        max_length=7,
        min_new_tokens=8,
        no_repeat_ngram_size=1,
        num_beams=2,
        max_new_tokens=2,
    )
    own.update(suppress_tokens=sorted({token for row in expected[0] for token in row}))
    assert (answers(model, GREEDY), answers(model, DRAWN)) == expected
    assert model.generation_config is own


def test_the_reference_answers_as_the_base_without_adapters() -> None:
    base = build_model("llama").eval()
    expected = answers(base, GREEDY), answers(base, DRAWN)
    model: PeftModel = adapt(base, lora_dropout=0.5)
    for name, weight in model.named_parameters():
        weight.requires_grad_("lora_A" in name)  # half of the adapters
    policy = answers(model, GREEDY)
    assert policy != expected[0]  # guards the comparison
    found = (
        answers(model, GREEDY, reference=True),
        answers(model, DRAWN, reference=True),
    )
    assert found == expected
    assert answers(model, GREEDY) == policy
    for name, weight in model.named_parameters():
        assert weight.requires_grad == ("lora_A" in name)


# Nothing else changes -----------------------------------------------------------------------------


def made(folder: Path, **options: Any) -> When2CallModule:
    """A module in training mode with dropout, its adapters away from their zero start."""
    lora = Lora(
        r=4,
        lora_alpha=8,
        lora_dropout=0.5,
        target_modules=["q_proj", "v_proj", "o_proj"],
    )
    policy = Policy(str(folder), lora=lora, generation=DRAWN, **options)
    module = When2CallModule(policy)
    move_adapters(module)
    return module.train()


def batch() -> dict[str, Any]:
    found: dict[str, Any] = collate_responses(prompts_of(), [[] for _ in prompts_of()])
    return found | {"index": torch.arange(4)}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_generating_during_training_leaves_modes_and_random_state_alone(
    checkpointing, language_model_folder
) -> None:
    module = made(language_model_folder, gradient_checkpointing=checkpointing)
    still = base_of(module.model).get_input_embeddings()
    still.eval()
    modes = {name: child.training for name, child in module.named_modules()}
    state = torch.get_rng_state()
    rows = batch()
    found = module.generate(rows["prompt_ids"], rows["prompt_lengths"])
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: child.training for name, child in module.named_modules()} == modes
    assert sum(modes.values()) > 10
    plain = made(language_model_folder).eval()
    assert found == plain.generate(rows["prompt_ids"], rows["prompt_lengths"])


def test_texts_end_before_the_end_token_and_the_cut_ones_are_told(
    language_model_folder,
) -> None:
    module, rows = made(language_model_folder), batch()
    free = generate_ids(module.model, prompts_of(), module.generation, ends=[END])
    assert list(map(len, free)) == [9] * 4
    end = free[1][3]
    config = base_of(module.model).generation_config
    config.eos_token_id = end  # the model's own end token counts beside the template's
    found = module.generate(rows["prompt_ids"], rows["prompt_lengths"])
    for answer, whole in zip(found, free, strict=True):
        kept = whole[: whole.index(end)] if end in whole else whole
        assert answer["answer"] == module.tokenizer.decode(kept)
        assert answer["cut"] == (end not in whole)
    assert not found[1]["cut"]
    module.generation = Generation(
        **vars(DRAWN) | {"max_new_tokens": free[1].index(end) + 1}
    )
    # an end token in the last place is an end all the same
    assert not module.generate(rows["prompt_ids"], rows["prompt_lengths"])[1]["cut"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0, .*at least 1"),
        ({"temperature": 0.0}, "temperature=0.0, .*sample: false"),
        ({"top_k": -1}, "top_k=-1, .*0 for all"),
    ],
)
def test_settings_that_generate_nothing_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        Generation(**settings)
