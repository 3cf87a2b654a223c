"""Answers from a causal language model: greedy, or drawn by a seed of their own.

What is drawn depends on the prompts of the batch, the settings and their seed, not on what was
drawn before, and the random state of a training run is left alone. A model's own generation
defaults (its generation_config) do not apply.

A model whose weights are in float32 answers in float32, under a mixed precision too: then an answer
does not depend on the other prompts of its batch or on padding, and is what the export writes. In
bfloat16 two tokens of about the same probability change places by either.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from pl_pointwise.task import Batch, replayed_random_state
from pl_pointwise.tasks.common.records import digest

from ..likelihood.scoring import base_of, inference
from ..text.conversations import ConversationEncoder
from ..text.reasoning import in_thought, is_refusal

# tokens at a prompt's end in which a thought may begin that the answer goes on with
_TAIL = 32


@dataclass
class Generation:
    """How an answer is generated.

    Args:
        max_new_tokens: the longest answer, the token that ends it included.
        sample: draw tokens instead of taking the likeliest.
        temperature: of the draws.
        top_k: tokens a draw may take; 0 for all.
        seed: of the draws; another one for other answers to the same prompts.

    >>> from pl_pointwise.tasks import Generation
    >>> Generation(max_new_tokens=32, sample=True, temperature=0.7)
    Generation(max_new_tokens=32, sample=True, temperature=0.7, top_k=50, seed=0)
    """

    max_new_tokens: int = 256
    sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or not self.temperature > 0 or self.top_k < 0:
            raise ValueError(
                f"{self}: max_new_tokens is at least 1, temperature above 0 (sample: false for "
                "greedy), and top_k a number of tokens, or 0 for all."
            )


def decoded(ids: Sequence[int], encoder: ConversationEncoder) -> str:
    """The text of tokens, special ones included."""
    return str(encoder.tokenizer.decode(list(ids), skip_special_tokens=False))


def text_of_response(
    encoder: ConversationEncoder, batch: Batch, row: int, column: int
) -> str:
    """A response of a batch as the text that a generated answer would have."""
    length = int(batch["response_lengths"][row, column])
    ids = batch["response_ids"][row, column, :length].tolist()
    # Some templates close a turn by two tokens.
    while ids and ids[-1] in encoder.end_ids:
        ids.pop()
    return encoder.answer_in(decoded(ids, encoder))


def generate_answers(
    model: nn.Module,
    encoder: ConversationEncoder,
    prompts: Sequence[Sequence[int]],
    settings: Generation,
    reference: bool = False,
) -> list[dict[str, Any]]:
    """{answer, refused, cut} of each prompt, until one of the tokens that end a turn.

    The answer is without thoughts (reasoning.py), "" where one did not end; it is cut where it ran
    into max_new_tokens.
    """
    of_model = base_of(model).generation_config.eos_token_id
    ends = {
        *encoder.end_ids,
        *(
            of_model
            if isinstance(of_model, list)
            else []
            if of_model is None
            else [of_model]
        ),
    }
    generated = generate_ids(
        model, prompts, settings, ends=sorted(ends), reference=reference
    )
    reports = []
    for prompt, ids in zip(prompts, generated, strict=True):
        # No end token came within max_new_tokens.
        cut = ids[-1] not in ends
        begun = in_thought(decoded(prompt[-_TAIL:], encoder), encoder.thoughts)
        text = begun + decoded(ids if cut else ids[:-1], encoder)
        answer = encoder.answer_in(text)
        refused = is_refusal(answer, encoder.thoughts)
        reports.append({"answer": answer, "refused": refused, "cut": cut})
    return reports


def precision_of_weights(model: nn.Module) -> AbstractContextManager[Any]:
    """No autocast around a model in float32; around others what is there already."""
    weights = [*model.parameters()]
    # Parts of several precisions, as adapters on a base in bfloat16, may need it to fit together.
    if any(weight.dtype != torch.float32 for weight in weights):
        return nullcontext()
    return torch.autocast(weights[0].device.type, enabled=False)


def generate_ids(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    settings: Generation,
    *,
    ends: Sequence[int],
    reference: bool = False,
) -> list[list[int]]:
    """Token ids behind each prompt, with the end token where the answer came to one.

    Runs in evaluation mode and without gradients; the model is left as it was found.
    """
    base, width = base_of(model), max(map(len, prompts))
    # Padding is masked out, so any token will do for it. It is on the left: the next token is then
    # in the same place for every prompt.
    filled = [[ends[0]] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    ids = torch.tensor(filled, device=base.device)
    attended = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    mask = torch.tensor(attended, device=base.device)
    of_model = base.generation_config
    # generate() fills in from the model's own whatever is not set, so those are set aside.
    drawing = {"temperature": float(settings.temperature), "top_k": settings.top_k}
    base.generation_config = GenerationConfig(
        max_new_tokens=settings.max_new_tokens,
        do_sample=settings.sample,
        eos_token_id=list(ends),
        pad_token_id=ends[0],
        **(drawing if settings.sample else {}),
    )
    try:
        with (
            inference(model, reference),
            replayed_random_state(base.device),
            precision_of_weights(base),
        ):
            torch.manual_seed(int(digest(settings.seed, filled)[:15], 16))
            whole = base.generate(input_ids=ids, attention_mask=mask)
    finally:
        base.generation_config = of_model
    assert isinstance(whole, Tensor)
    answers = []
    for row in whole[:, width:].tolist():  # Padding follows an end token.
        end = next(
            (place for place, token in enumerate(row) if token in ends), len(row)
        )
        answers.append(row[: end + 1])
    return answers
