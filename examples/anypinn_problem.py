"""AnyPINN's oscillator without loss weights: its damping from noisy data, in tolerances."""

import math

import torch
from anypinn import core
from anypinn.lightning import PINNModule
from anypinn.problems import DataConstraint, ODEProperties, ResidualsConstraint
from lightning.pytorch import Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pl_pointwise import Constraint, Pointwise, PointwiseLoss

SECONDS, OMEGA, ZETA, NOISE, STEPS = 2.0, 2 * math.pi, 0.15, 0.02, 3000
BOUNDS = {"equation": Constraint(at_most=1e-3 * OMEGA**2), "data": Constraint(at_most=3 * NOISE)}


class PointwiseProblem(core.Problem):
    """AnyPINN's problem, whose conditions are requirements: every point has a multiplier."""

    def __init__(self, points, constraints, fields, params):
        super().__init__(list(constraints.values()), nn.L1Loss(reduction="none"), fields, params)
        self.by_name = constraints
        self.constrained = PointwiseLoss(BOUNDS, Pointwise(), samples=points, total_steps=STEPS)

    def training_loss(self, batch, log=None):
        off = {n: c.loss(batch, self.criterion).reshape(-1) for n, c in self.by_name.items()}
        count, zeros = len(off["equation"]), torch.zeros_like(off["data"])
        off = {"equation": torch.cat([off["equation"], zeros]),
               "data": torch.cat([torch.zeros(count), off["data"]])}
        index = torch.arange(len(off["data"]))  # One batch: all points, in order.
        masks = {"equation": index < count, "data": index >= count, "objective": index >= count}
        return self.constrained(off["data"].square(), off, index, masks=masks)


class PointwisePINN(PINNModule):
    def on_fit_start(self):
        pass  # No data module, from which it would take the domain.

    def on_train_batch_end(self, *_):
        self.problem.constrained.step()


def oscillator(t, y, args, derivatives):
    return -2 * args["zeta"](t) * OMEGA * derivatives[0] - OMEGA**2 * y


seed_everything(0, verbose=False)
t = torch.linspace(0, SECONDS, 100)[:, None]
slow = OMEGA * math.sqrt(1 - ZETA**2)
wave = torch.cos(slow * t) + ZETA * OMEGA / slow * torch.sin(slow * t)
exact = torch.exp(-ZETA * OMEGA * t) * wave
data = (exact + NOISE * torch.randn(exact.shape))[:, None]
mlp = core.MLPConfig(in_dim=1, out_dim=1, hidden_layers=[32, 32], activation="tanh",
                     encode=lambda t: t - SECONDS / 2)
fields = {"x": core.Field(mlp)}
params = {"zeta": core.Parameter(core.ScalarConfig(init_value=0.5))}
start = ODEProperties(oscillator, {}, y0=torch.ones(1), order=2, dy0=[torch.zeros(1)])
constraints = {"equation": ResidualsConstraint(start, fields, params),
               "data": DataConstraint(fields, params, lambda t, f, p: f["x"](t)[:, None])}
hp = core.PINNHyperparameters(
    lr=5e-3, training_data=core.GenerationConfig(batch_size=1, data_ratio=1, collocations=100, x=t, noise_level=NOISE, args_to_train={}), fields_config=mlp, params_config=core.ScalarConfig(init_value=0.5), scheduler=core.CosineAnnealingConfig(T_max=STEPS))
module = PointwisePINN(PointwiseProblem(200, constraints, fields, params), hp)
loader = DataLoader([((t, data), t)], batch_size=None)
Trainer(max_epochs=STEPS, accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False).fit(module, loader)
error = (fields["x"](t) - exact).norm() / exact.norm()
print(f"damping {params['zeta']().item():.3f}, true {ZETA}; relative error {error:.4f}")
