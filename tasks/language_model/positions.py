"""How many tokens a model can read: its positions."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase

from pl_pointwise.tasks.common.models import model_source

_UNKNOWN = 10**9
"""A tokenizer's model_max_length from here on means that it does not know."""


@dataclass(frozen=True)
class Positions:
    """What a model's positions allow; None where nothing is known, or nothing bounds it."""

    most: int | None
    """The most tokens it was made for."""
    learnt: bool
    """Whether there are none beyond: a longer sequence is an IndexError."""


def positions_of(name: str, revision: str | None, tokenizer: PreTrainedTokenizerBase) -> Positions:
    """The positions of a model by its configuration; by its tokenizer where that says nothing."""
    try:
        config = AutoConfig.from_pretrained(
            model_source(name), revision=revision, trust_remote_code=False
        ).get_text_config()
    except (OSError, ValueError):  # a folder of a tokenizer alone
        config = None
    most = getattr(config, "max_position_embeddings", None)
    if most is not None:
        return Positions(most, _learnt(config))
    most = tokenizer.model_max_length
    return Positions(most if most < _UNKNOWN else None, learnt=False)


def check_room(config: PreTrainedConfig, prompt: int, answer: int) -> None:
    """Refuses an answer that would run beyond learnt positions, which ends in an IndexError.

    Rotary positions have no end, and models differ in what they make of those they never saw.

    Args:
        config: of the model.
        prompt: tokens of the longest prompt.
        answer: the most tokens of an answer.

    Raises:
        ValueError: it does not fit.
    """
    most = getattr(config, "max_position_embeddings", None)
    if most is None or not _learnt(config) or prompt + answer <= most:
        return
    raise ValueError(
        f"A prompt of {prompt:,} tokens and an answer of up to {answer:,} do not fit into the "
        f"{most:,} positions of the model. Lower policy.generation.max_new_tokens or "
        "preparation.max_prompt_length."
    )


def _learnt(config: PreTrainedConfig | None) -> bool:
    """Whether every position has weights of its own, as GPT-2's."""
    rotary = ("rope_parameters", "rope_scaling", "rope_theta")
    return not any(getattr(config, name, None) for name in rotary)
