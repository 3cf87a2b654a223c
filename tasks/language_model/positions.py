"""How many tokens a model can read where it has learnt every position, as GPT-2."""

from __future__ import annotations

from transformers import PreTrainedConfig


def learnt_positions(config: PreTrainedConfig) -> int | None:
    """How many positions have weights of their own; a longer sequence is an IndexError.

    None where nothing ends: rotary positions, or none.
    """
    config = config.get_text_config()
    rotary = ("rope_parameters", "rope_scaling", "rope_theta")
    if any(getattr(config, name, None) for name in rotary):
        return None
    return getattr(config, "max_position_embeddings", None)


def check_room(config: PreTrainedConfig, prompt: int, answer: int) -> None:
    """
    Raises:
        ValueError: a prompt and an answer of so many tokens do not fit into the learnt positions.
    """
    most = learnt_positions(config)
    if most is not None and prompt + answer > most:
        raise ValueError(
            f"A prompt of {prompt:,} tokens and an answer of up to {answer:,} do not fit into the "
            f"{most:,} positions of the model. Lower policy.generation.max_new_tokens or "
            "preparation.max_prompt_length."
        )
