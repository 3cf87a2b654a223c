"""A line through noisy points: the smallest weights that leave no point further off than 0.1."""

import torch

from pl_pointwise import Constraint, Pointwise, PointwiseLoss

torch.manual_seed(0)
x = torch.randn(40, 3)
y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.03 * torch.randn(40)
weights = torch.zeros(3, requires_grad=True)
optimizer = torch.optim.Adam([weights], lr=0.1)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=500)

bounds = {"fit": Constraint(at_most=0.1)}
constrained = PointwiseLoss(bounds, Pointwise(), samples=len(x), total_steps=500)

for _ in range(100):
    for index in torch.randperm(len(x)).split(8):
        outputs = x[index] @ weights
        loss = constrained(
            objective=weights.square().sum().expand(len(index)),  # (B,)
            values={"fit": (outputs - y[index]).abs()},  # (B,) or (B, K)
            index=index,  # (B,), each sample's position in the training set
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        constrained.step()  # λ of these samples

error = (x @ weights - y).abs()
print(f"largest error {error.max():.2f}")
print(f"λ > 0 on {int((constrained.multipliers['fit'] > 0.01).sum())} of {len(x)} samples")
# largest error 0.10
# λ > 0 on 3 of 40 samples
