"""Runs examples/ and draws what each ends with: docs/examples/NAME.png.

    MODEL=FOLDER python docs/example_pictures.py [NAME ...]

pina_solver and anypinn_module need `pip install pina-mathlab anypinn`, and Python 3.12.

MODEL: of trl_sft, a folder in place of the model from the hub.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes

from pl_pointwise.compare.plots import BLUE, ORANGE, RED

ROOT = Path(__file__).resolve().parents[1]
GREY = "0.7"
Names = Mapping[str, Any]


def sorted_values(axes: Axes, values: torch.Tensor, bound: float, text: str) -> None:
    """Every sample's value, the smallest first, below the bound."""
    values = values.detach().flatten().sort().values
    colours = [RED if value > bound * 1.02 else BLUE for value in values.tolist()]
    axes.bar(range(len(values)), values.numpy(), color=colours, width=1.0)
    axes.axhline(bound, color="black", linestyle="--", linewidth=1)
    axes.set_ylabel(text)
    axes.set_xlabel("samples, in order")


def plain_loop(axes: Axes, of: Names) -> None:
    sorted_values(axes, of["error"], 0.1, "error")


def hf_trainer(axes: Axes, of: Names) -> None:
    sorted_values(
        axes, (of["now"] - of["before"]).abs().amax(1), 0.5, "change of a logit"
    )


def trl_sft(axes: Axes, of: Names) -> None:
    history = of["trainer"].constrained.history
    curves = history.curves()
    worst = [value + 0.1 for value in curves.worst["kl"]]
    axes.plot(curves.steps, worst, color=BLUE, label="largest KL")
    axes.axhline(0.1, color="black", linestyle="--", linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel("nats per token")
    other = axes.twinx()
    other.plot(
        curves.steps, curves.objective, color=ORANGE, label="loss of the answers"
    )
    other.set_ylabel("loss of the answers", color=ORANGE)


def lightning_module(axes: Axes, of: Names) -> None:
    data = of["Points"](batch_size=40)
    data.setup("fit")
    batch = data.collate(data.datasets["train"])
    sorted_values(axes, (of["module"](batch) - batch["y"]).abs(), 0.1, "error")


def classifier_update(axes: Axes, of: Names) -> None:
    margins = of["net"](of["images"]).detach()
    labels = of["labels"]
    right = margins.gather(1, labels[:, None])[:, 0]
    others = margins.scatter(1, labels[:, None], -torch.inf).amax(1)
    kept = (right - others)[of["kept"]]
    axes.hist(kept.clamp(max=15).numpy(), bins=40, color=BLUE)
    axes.axvline(0.1, color="black", linestyle="--", linewidth=1)
    axes.set_xlabel("margin of an old digit")
    axes.set_ylabel("digits")


def family(axes: Axes, of: Names) -> None:
    answer = of["answer"]
    axes.scatter(
        of["cost"](of["net"](of["unseen"]), of["unseen"]).detach(),
        answer.bound,
        color=GREY,
        s=14,
        label="the network's answer",
    )
    axes.scatter(answer.objective, answer.bound, color=BLUE, s=14, label="corrected")
    ends = [0.0, float(answer.objective.max())]
    axes.plot(ends, ends, color="black", linestyle="--", linewidth=1)
    axes.set_xlabel("cost of the answer")
    axes.set_ylabel("proved: no cost is below")
    axes.legend(frameon=False)


def physics(axes: Axes, of: Names) -> None:
    t = of["t"][:, 0]
    axes.plot(t, of["exact"][:, 0], color=GREY, linewidth=5, label="exact")
    axes.plot(t, of["net"](2 * of["t"] - 1)[:, 0].detach(), color=BLUE, label="network")
    axes.scatter(
        t[of["data"]], of["exact"][of["data"], 0], color=ORANGE, zorder=3, label="data"
    )
    axes.set_xlabel("t")
    axes.legend(frameon=False)


def pina_solver(axes: Axes, of: Names) -> None:
    points = torch.linspace(0, 1, 101)
    at = of["points"].clone()[:101]
    at[:, 0], at[:, 1] = points, 0.5
    exact = of["problem"].solution(at).tensor[:, 0]
    axes.plot(points, exact, color=GREY, linewidth=5, label="exact")
    found = of["solver"](at).tensor[:, 0].detach()
    axes.plot(points, found, color=BLUE, label="network, at y = ½")
    axes.set_xlabel("x")
    axes.legend(frameon=False)


def anypinn_module(axes: Axes, of: Names) -> None:
    t = of["t"][:, 0]
    axes.plot(t, of["exact"][:, 0], color=GREY, linewidth=5, label="exact")
    found = of["fields"]["x"](of["t"])[:, 0].detach()
    axes.plot(t, found, color=BLUE, label="network")
    axes.scatter(t, of["data"][:, 0], color=ORANGE, s=6, zorder=3, label="data")
    axes.set_xlabel("t")
    axes.legend(frameon=False)


PICTURES: dict[str, Callable[[Axes, Names], None]] = {
    each.__name__: each
    for each in (
        plain_loop,
        hf_trainer,
        trl_sft,
        lightning_module,
        classifier_update,
        family,
        physics,
        pina_solver,
        anypinn_module,
    )
}


def main(names: list[str]) -> None:
    target = ROOT / "docs/examples"
    target.mkdir(exist_ok=True)
    for name in names or PICTURES:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            found = runpy.run_path(
                str(ROOT / f"examples/{name}.py"), run_name="__main__"
            )
            os.chdir(ROOT)
        figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
        PICTURES[name](axes, found)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(target / f"{name}.png", dpi=100)
        plt.close(figure)


if __name__ == "__main__":
    main(sys.argv[1:])
