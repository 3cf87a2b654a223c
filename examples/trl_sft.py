"""SFTTrainer learns two answers; the model stays within 0.1 nats a token of itself on each."""

import os

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from pl_pointwise import Constraint, Pointwise
from pl_pointwise.trainer import PointwiseTrainerMixin

ANSWERS = {"Who wrote the report?": " Ada Byron.", "Where is it kept?": " In room nine."}


class BudgetTrainer(PointwiseTrainerMixin, SFTTrainer):
    def terms(self, model, inputs):
        labels = inputs["labels"][:, 1:]
        answer, tokens = labels != -100, inputs["input_ids"]
        now = model(tokens, attention_mask=inputs["attention_mask"]).logits[:, :-1].log_softmax(-1)
        with torch.no_grad(), self.accelerator.unwrap_model(model).disable_adapter():
            before = model(tokens, attention_mask=inputs["attention_mask"]).logits[:, :-1]
        kl = (before.softmax(-1) * (before.log_softmax(-1) - now)).sum(2)
        nll = -now.gather(2, labels.clamp(min=0)[..., None])[..., 0]
        mean = answer.float() / answer.sum(1, keepdim=True)  # Over the answer's tokens.
        return (nll * mean).sum(1), {"kl": (kl * mean).sum(1)}  # (B,) and (B,)


trainer = BudgetTrainer(
    model=os.environ.get("MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    args=SFTConfig("budget", num_train_epochs=20, learning_rate=1e-3, bf16=False),
    train_dataset=Dataset.from_list([{"prompt": q, "completion": a} for q, a in ANSWERS.items()]),
    peft_config=LoraConfig(),
    constraints={"kl": Constraint(at_most=0.1)},
    formulation=Pointwise(),
)
trainer.train()
# requirement  violated    worst  95 % within  λ > 0  price
# kl ≤ 0.1       0 of 2  0.09325       0.0932   on 2  3.887
