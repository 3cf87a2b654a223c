"""Supervised fine-tuning that leaves the model near itself on every prompt.

Each prompt has a budget: the KL divergence of its answers' tokens from the model before training,
in nats per token and on average over its answers, stays below ``--budget``.

    python examples/sft_budget.py --output_dir budget  # a small random model, on a CPU
    python examples/sft_budget.py --output_dir budget \
        --model_name_or_path HuggingFaceTB/SmolLM2-135M
    accelerate launch --num_processes 2 examples/sft_budget.py --output_dir budget \
        --gradient_accumulation_steps 4 --save_strategy epoch

The same command with ``--resume`` goes on from the last checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser

from pl_pointwise import Constraint, Pointwise
from pl_pointwise.trainer import PointwiseTrainerMixin

ANSWERS = {
    "Who wrote the report?": ["Ada Byron.", "It was Ada Byron."],
    "Where is it kept?": ["In room nine.", "You find it in room nine."],
    "When was it written?": ["In the spring of 1843.", "In spring, 1843."],
}


@dataclass
class BudgetArguments:
    """Beside those of SFTConfig and ModelConfig."""

    budget: float = 0.1  # Nats per token.
    without_target: bool = False  # KL over the other tokens, to which the answer costs nothing.
    resume: bool = False


class BudgetTrainer(PointwiseTrainerMixin, SFTTrainer):
    without_target = False

    def terms(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        labels = inputs["labels"][:, 1:]
        answer, targets = labels != -100, labels.clamp(min=0)[..., None]

        def log_probabilities() -> torch.Tensor:
            logits = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            return logits[:, :-1].float().log_softmax(-1)

        now = log_probabilities()
        with torch.no_grad(), self.accelerator.unwrap_model(model).disable_adapter():
            before = log_probabilities()
        learnt = -now.gather(2, targets)[..., 0]
        if self.without_target:  # arXiv 2605.29498
            now, before = (each.scatter(2, targets, -1e4).log_softmax(-1) for each in (now, before))
        kl = (before.exp() * (before - now)).sum(2)
        learnt, kl = ((each * answer).sum(1) / answer.sum(1) for each in (learnt, kl))
        return learnt, {"kl": kl}


def small_model(texts: list[str]) -> dict[str, Any]:
    """A random model and its tokenizer, for a try without a download."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=["<end>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=len(fast), num_attention_heads=2, **size)
    return {"model": LlamaForCausalLM(config), "processing_class": fast}


if __name__ == "__main__":
    parser = TrlParser((BudgetArguments, SFTConfig, ModelConfig))
    options, args, chosen = parser.parse_args_and_config()
    set_seed(args.seed)
    rows = [{"prompt": p, "completion": f" {a}"} for p, given in ANSWERS.items() for a in given]
    name = chosen.model_name_or_path
    model = {"model": name} if name else small_model([str(row) for row in rows])
    BudgetTrainer.without_target = options.without_target
    trainer = BudgetTrainer(
        args=args,
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(target_modules="all-linear"),
        constraints={"kl": Constraint(at_most=options.budget)},
        formulation=Pointwise(),
        groups=[[*ANSWERS].index(row["prompt"]) for row in rows],
        **model,
    )
    trainer.train(resume_from_checkpoint=options.resume or None)
    trainer.save_model()
