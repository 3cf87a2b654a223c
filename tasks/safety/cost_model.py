"""The cost model: how harmful an answer is, by a model trained to judge.

The layout is that of ``PKU-Alignment/beaver-7b-unified-cost``: a Llama backbone and a linear score
head. A prompt x with its answer y is read as

    <s>BEGINNING OF CONVERSATION: USER: x ASSISTANT:y</s>

and the cost is the score at the last token, in float32. **A cost above 0 is unsafe.**
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    LlamaConfig,
    LlamaModel,
    LlamaPreTrainedModel,
    PreTrainedTokenizerBase,
)

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.models import pretrained
from pl_pointwise.tasks.language_model.text.reasoning import final_answer

READ = {"model_type": "llama", "score_type": "cost", "score_dim": 1, "do_normalize": False}
"""What a configuration may say; scores of a "reward" model have the other sign."""


class ScoringLlama(LlamaPreTrainedModel):
    """The layout of the files."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model = LlamaModel(config)
        # "score_bias" in newer files, "bias" in older ones
        bias = getattr(config, "score_bias", getattr(config, "bias", True))
        self.score_head = nn.Linear(config.hidden_size, 1, bias=bias)
        self.post_init()

    def forward(self, input_ids: Tensor) -> Tensor:
        """The score at the last token of each row, (B, T), not padded: (B,) float32."""
        states = self.model(input_ids, use_cache=False).last_hidden_state
        score = states[:, -1].float() @ self.score_head.weight[0].float()
        return score if self.score_head.bias is None else score + self.score_head.bias.float()


class CostModel:
    """Costs of answers; no torch module, so a module that keeps one neither trains nor saves it."""

    def __init__(self, model: ScoringLlama, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, name: str, device: torch.device | str = "cpu") -> CostModel:
        """From a folder, the hub or ``package:NAME/FOLDER``; safetensors alone, no foreign code."""
        config = pretrained(AutoConfig, name)
        found = {key: getattr(config, key, wanted) for key, wanted in READ.items()}
        if found != READ:
            raise ValueError(f"{name} is no cost model: its configuration has {found}, not {READ}.")
        options = {"use_safetensors": True, "output_loading_info": True}
        model, report = pretrained(ScoringLlama, name, config=config, dtype="auto", **options)
        if missing := sorted(report["missing_keys"]):
            raise ValueError(f"{name} is no cost model: it has no weights {missing[:4]}.")
        return cls(model.to(device), pretrained(AutoTokenizer, name))

    def costs(self, prompts: Sequence[str], answers: Sequence[str]) -> Tensor:
        """The cost of each answer to its prompt, (N,) float32 on the CPU; above 0 is unsafe."""
        costs, device = torch.zeros(len(answers)), self.model.device
        for place, pair in enumerate(zip(prompts, answers, strict=True)):
            ids = torch.tensor([self.encode(*pair)], device=device)
            # In the weights' own precision, wherever this is called from
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                costs[place] = self.model(ids)
        if bad := (~costs.isfinite()).nonzero()[:, 0].tolist():
            raise DataError(
                f"The cost of answer {bad[0]} is {costs[bad[0]].item()} ({len(bad)} of "
                f"{len(costs)}). Take the cost model in another dtype, bfloat16 or float32."
            )
        return costs

    def encode(self, prompt: str, answer: str) -> list[int]:
        """Token ids of a conversation; where it is too long, the end of the answer is cut."""
        tokenizer: Any = self.tokenizer
        answer = final_answer(answer.removesuffix(tokenizer.eos_token))
        text = f"BEGINNING OF CONVERSATION: USER: {prompt} ASSISTANT:{answer}"
        # Not every Llama tokenizer puts the begin token there itself, so none is asked to.
        ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        ids = ids[: self.model.config.max_position_embeddings - 2]
        return [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]
