"""AnyPINN's damped oscillator without loss weights: how much it is damped, from noisy data."""

import math

import torch
from anypinn import core
from anypinn.lightning import PINNModule
from anypinn.problems import DataConstraint, ODEProperties, ResidualsConstraint
from lightning.pytorch import Trainer, seed_everything
from torch.utils.data import DataLoader

from pl_pointwise import Constraint, Pointwise, PointwiseLoss

OMEGA, ZETA, NOISE, STEPS = 2 * math.pi, 0.15, 0.02, 3000
BOUNDS = {"equation": 0.01 * OMEGA**2, "data": 3 * NOISE}  # Each in its own unit.


class PointwiseModule(PINNModule):
    """AnyPINN's module, whose problem's terms are requirements: every point has a multiplier."""

    def on_fit_start(self):
        bounds = {name: Constraint(at_least=-b, at_most=b) for name, b in BOUNDS.items()}
        self.loss = PointwiseLoss(bounds, Pointwise(), samples=100, total_steps=STEPS)

    def training_step(self, batch, batch_idx):
        terms = zip(BOUNDS, self.problem.constraints, strict=True)
        off = {name: term.loss(batch, self.problem.criterion).flatten() for name, term in terms}
        return self.loss(off["data"].square(), off, torch.arange(100))

    def on_train_batch_end(self, *_):
        self.loss.step()


def oscillator(t, x, args, derivatives):
    return -2 * args["zeta"](t) * OMEGA * derivatives[0] - OMEGA**2 * x


seed_everything(0, verbose=False)
t = torch.linspace(0, 2, 100)[:, None]
slow, decay = OMEGA * math.sqrt(1 - ZETA**2), ZETA * OMEGA
exact = (-decay * t).exp() * ((slow * t).cos() + decay / slow * (slow * t).sin())
data = exact + NOISE * torch.randn(100, 1)
sizes = {"in_dim": 1, "out_dim": 1, "hidden_layers": [32, 32]}
mlp = core.MLPConfig(**sizes, activation="tanh", encode=lambda t: t - 1)
scalar, cosine = core.ScalarConfig(init_value=0.5), core.CosineAnnealingConfig(T_max=STEPS)
fields, params = {"x": core.Field(mlp)}, {"zeta": core.Parameter(scalar)}
props = ODEProperties(oscillator, {}, y0=torch.ones(1), order=2, dy0=[torch.zeros(1)])
of_data = DataConstraint(fields, params, lambda t, fields, params: fields["x"](t))
terms = [ResidualsConstraint(props, fields, params), of_data]
configs = {"fields_config": mlp, "params_config": scalar, "scheduler": cosine}
hp = core.PINNHyperparameters(lr=5e-3, training_data=None, **configs)
difference = torch.sub  # Of each point, with its sign: in place of nn.MSELoss().
module = PointwiseModule(core.Problem(terms, difference, fields, params), hp)
batch = DataLoader([((t, data), t)], batch_size=None)  # All points, in order.
quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
Trainer(max_epochs=STEPS, accelerator="cpu", **quiet).fit(module, batch)
print(f"damping {params['zeta']().item():.2f}, which is {ZETA}")
# damping 0.15, which is 0.15
