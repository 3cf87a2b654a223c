"""A Hugging Face Trainer that learns new labels and stays close to every old prediction."""

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from pl_pointwise import Constraint, Pointwise
from pl_pointwise.trainer import PointwiseTrainerMixin

torch.manual_seed(0)
x, old = torch.randn(60, 4), nn.Linear(4, 2)
before = old(x).detach()
rows = [{"x": x[i], "label": int(x[i, 0] > 0), "before": before[i]} for i in range(60)]


class Keeping(PointwiseTrainerMixin, Trainer):
    def terms(self, model, inputs):
        now = model(inputs["x"])
        learnt = nn.functional.cross_entropy(now, inputs["labels"], reduction="none")
        return learnt, {"change": (now - inputs["before"]).abs().amax(1)}  # (B,) and (B,)


trainer = Keeping(
    model=nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2)),
    args=TrainingArguments(
        "keeping", num_train_epochs=100, learning_rate=0.01, remove_unused_columns=False
    ),
    train_dataset=rows,
    constraints={"change": Constraint(at_most=0.5)},
    formulation=Pointwise(),
)
trainer.train()
now = trainer.model(x.to(trainer.args.device)).cpu()
print(f"largest change of a logit {(now - before).abs().max():.2f}")
# largest change of a logit 0.50
