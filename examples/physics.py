"""A PINN without loss weights: u'' + 4u' + 100u = 0 from u(0) = 1, u'(0) = 0, and five data."""

import torch
from torch import nn

from pl_pointwise import Constraint, Pointwise, PointwiseLoss

torch.manual_seed(0)
t = torch.linspace(0, 1, 100)[:, None]
data = torch.arange(100) % 20 == 10
frequency = (100 - 4) ** 0.5
exact = (-2 * t).exp() * ((frequency * t).cos() + 2 / frequency * (frequency * t).sin())
net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4000)
constrained = PointwiseLoss(
    {"equation": Constraint(at_most=1.0), "start": Constraint(at_most=0.01)},
    Pointwise(),
    samples=len(t),
)
for _ in range(4000):
    time = t.clone().requires_grad_()
    u = net(time)
    speed = torch.autograd.grad(u.sum(), time, create_graph=True)[0]
    acceleration = torch.autograd.grad(speed.sum(), time, create_graph=True)[0]
    equation = (acceleration + 4 * speed + 100 * u).abs()
    start = torch.cat([(u - 1).abs(), speed.abs() / 10], 1)
    loss = constrained(
        objective=(u - exact).square()[:, 0],
        values={"equation": equation, "start": start},
        index=torch.arange(len(t)),
        masks={"objective": data, "start": torch.arange(100) == 0},
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    constrained.step()
print(f"relative error {(net(t) - exact).norm() / exact.norm():.3f}")
# relative error 0.012
