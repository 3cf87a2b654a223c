"""AnyPINN's damped oscillator without loss weights: how much it is damped, from noisy data."""

import math

import torch
from anypinn import core
from anypinn.lightning import PINNModule
from anypinn.problems import DataConstraint, ODEProperties, ResidualsConstraint
from lightning.pytorch import Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader

from pl_pointwise import Constraint, Pointwise, PointwiseLoss

OMEGA, ZETA, NOISE, STEPS = 2 * math.pi, 0.15, 0.02, 2500
BOUNDS = {"equation": 1e-3 * OMEGA**2, "data": 3 * NOISE}  # Each in its own unit.


class PointwiseModule(PINNModule):
    """AnyPINN's module, whose problem's conditions are requirements: a multiplier for each point."""

    def on_fit_start(self):
        bounds = {name: Constraint(at_least=-b, at_most=b) for name, b in BOUNDS.items()}
        self.loss = PointwiseLoss(bounds, Pointwise(), samples=200, total_steps=STEPS)

    def training_step(self, batch, batch_idx):
        conditions = zip(BOUNDS, self.problem.constraints, strict=True)
        off = {name: of.loss(batch, self.problem.criterion).flatten() for name, of in conditions}
        zeros, at_data = torch.zeros(100), torch.arange(200) >= 100
        values = {"equation": torch.cat([off["equation"], zeros])}
        values["data"] = torch.cat([zeros, off["data"]])
        masks = {"equation": ~at_data, "data": at_data, "objective": at_data}
        return self.loss(values["data"].square(), values, torch.arange(200), masks=masks)

    def on_train_batch_end(self, *_):
        self.loss.step()


def oscillator(t, x, args, derivatives):
    return -2 * args["zeta"](t) * OMEGA * derivatives[0] - OMEGA**2 * x


class Difference(nn.Module):
    def forward(self, found, wanted):
        return found - wanted  # Of each point, with its sign: in place of nn.MSELoss().


seed_everything(0, verbose=False)
t = torch.linspace(0, 2, 100)[:, None]
slow = OMEGA * math.sqrt(1 - ZETA**2)
exact = (-ZETA * OMEGA * t).exp() * ((slow * t).cos() + ZETA * OMEGA / slow * (slow * t).sin())
data = exact + NOISE * torch.randn(100, 1)
scalar, layers = core.ScalarConfig(init_value=0.5), [32, 32]
mlp = core.MLPConfig(
    in_dim=1, out_dim=1, hidden_layers=layers, activation="tanh", encode=lambda t: t - 1
)
fields, params = {"x": core.Field(mlp)}, {"zeta": core.Parameter(scalar)}
props = ODEProperties(oscillator, {}, y0=torch.ones(1), order=2, dy0=[torch.zeros(1)])
residuals = ResidualsConstraint(props, fields, params)
of_data = DataConstraint(fields, params, lambda t, f, p: f["x"](t))
hp = core.PINNHyperparameters(
    lr=5e-3, training_data=None, fields_config=mlp, params_config=scalar,
    scheduler=core.CosineAnnealingConfig(T_max=STEPS))
module = PointwiseModule(core.Problem([residuals, of_data], Difference(), fields, params), hp)
quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
loader = DataLoader([((t, data), t)], batch_size=None)  # All points, in order.
Trainer(max_epochs=STEPS, accelerator="cpu", **quiet).fit(module, loader)
error = (fields["x"](t) - exact).norm() / exact.norm()
print(f"damping {params['zeta']().item():.3f} of {ZETA}, relative error {error:.4f}")
