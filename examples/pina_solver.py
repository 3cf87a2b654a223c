"""A PINA problem without loss weights: Δu = f within 0.02, u = 0 at the edge within 0.001."""

import torch
from lightning.pytorch import seed_everything
from pina import Trainer
from pina.model import FeedForward
from pina.optim import TorchOptimizer, TorchScheduler
from pina.problem.zoo import Poisson2DSquareProblem
from pina.solver import PINN

from pl_pointwise import Constraint, Pointwise, PointwiseLoss

STEPS = 1500


class PointwisePINN(PINN):
    """PINA's solver, whose conditions are requirements: every point has a multiplier."""

    def __init__(self, tolerances, **settings):
        super().__init__(**settings)
        bounds = {name: Constraint(at_most=bound) for name, bound in tolerances.items()}
        points = sum(len(of) for of in self.problem.discretised_domains.values())
        self.constrained = PointwiseLoss(
            bounds, Pointwise(), samples=points, total_steps=STEPS
        )

    def batch_evaluation_step(self, batch, batch_idx):
        conditions, device = self.problem.conditions, self.device
        residuals = {name: conditions[name].evaluate(dict(of), self) for name, of in batch}
        counts = torch.tensor([len(of) for of in residuals.values()], device=device)
        owner = torch.repeat_interleave(torch.arange(len(counts), device=device), counts)
        masks = {name: owner == place for place, name in enumerate(residuals)}
        values = {}
        for name, residual in residuals.items():
            zeros = torch.zeros(len(owner), device=device)
            size = residual.as_subclass(torch.Tensor)[:, 0].abs()
            values[name] = zeros.masked_scatter(masks[name], size)
        index = torch.arange(len(owner), device=device)  # One batch: all points, in order.
        return self.constrained(zeros, values, index, masks=masks)

    def on_train_batch_end(self, *_):
        self.constrained.step()


seed_everything(0, verbose=False)
problem = Poisson2DSquareProblem()
problem.discretise_domain(400, "lh", domains="D")
problem.discretise_domain(160, "random", domains="boundary")
solver = PointwisePINN(
    tolerances={"D": 0.02, "boundary": 0.001},
    problem=problem,
    model=FeedForward(2, 1, layers=[32, 32]),
    optimizer=TorchOptimizer(torch.optim.Adam, lr=5e-3),
    scheduler=TorchScheduler(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=STEPS),
)
Trainer(solver, max_epochs=STEPS, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False).train()
points = problem.spatial_domain.sample(1000, "random")
exact = problem.solution(points).tensor
print(f"relative error {(solver(points).tensor - exact).norm() / exact.norm():.4f}")
