"""A LightningModule: small weights are the objective, and every point is fitted within 0.1."""

import torch
from lightning.pytorch import Trainer

import pl_pointwise as pw


class SmallWeights(pw.PointwiseModule):
    def __init__(self, formulation):
        super().__init__(
            formulation=formulation,
            constraints={"fit": pw.Constraint(at_most=0.1)},
            training=pw.Training(pw.Optimization(learning_rate=0.1, schedule="linear")),
        )
        self.weights = torch.nn.Parameter(torch.zeros(3))

    def forward(self, batch):
        return batch["x"] @ self.weights

    def objective(self, outputs, batch):  # (B,)
        return self.weights.square().sum().expand(len(outputs))

    def constraint_values(self, outputs, batch):  # {"fit": (B,)}
        return {"fit": (outputs - batch["y"]).abs()}


class Points(pw.PointwiseDataModule):
    def setup(self, stage):
        x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
        y = x @ torch.tensor([1.0, -2.0, 0.5])
        self.datasets = {"train": [{"x": x[i], "y": y[i]} for i in range(40)]}


module = SmallWeights(pw.Pointwise())
Trainer(max_epochs=100, accelerator="cpu", logger=False).fit(module, Points(batch_size=8))
print("λ of every sample:", tuple(module.multipliers["fit"].shape))
# λ of every sample: (40, 1)
