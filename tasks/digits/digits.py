"""A classifier learns to read rotated digits and must not lose an upright one that it could read.

One file, to copy as the start of a task of your own: docs/own_task.md.
"""

from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_model
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torchmetrics import Metric

from pl_pointwise import (
    Constraint,
    Formulation,
    PointwiseDataModule,
    PointwiseModule,
    Training,
)
from pl_pointwise.errors import DataError
from pl_pointwise.evaluation import MeanBySample
from pl_pointwise.model_card import write_card

HIDDEN = 32
USAGE = """from safetensors.torch import load_file
from torch import nn
network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
network.load_state_dict(load_file("model.safetensors"))"""


@lru_cache
def digits() -> dict[str, tuple[Tensor, Tensor]]:
    """Images (n, 64) between 0 and 1 and labels (n,), in three parts that are always the same."""
    data = load_digits()
    train, rest = train_test_split(
        range(len(data.target)), test_size=0.5, random_state=0
    )
    val, test = train_test_split(rest, test_size=0.6, random_state=0)
    images, labels = torch.tensor(data.data / 16).float(), torch.tensor(data.target)
    parts = {"train": train, "val": val, "test": test}
    return {name: (images[part], labels[part]) for name, part in parts.items()}


@lru_cache
def old_model() -> nn.Sequential:
    """The model in use: scikit-learn's, trained on upright digits."""
    x, y = digits()["train"]
    old = MLPClassifier((HIDDEN,), learning_rate_init=0.01, random_state=0).fit(
        x.numpy(), y
    )
    layers = [nn.Linear(64, HIDDEN), nn.Linear(HIDDEN, 10)]
    for layer, weights, bias in zip(layers, old.coefs_, old.intercepts_, strict=True):
        layer.load_state_dict(
            {"weight": torch.tensor(weights.T), "bias": torch.tensor(bias)}
        )
    return nn.Sequential(layers[0], nn.ReLU(), layers[1])


class DigitsModule(PointwiseModule):
    """New model: cross-entropy on rotated digits; each upright one in ``kept`` has to stay right.

    Args:
        formulation: how ``kept`` is enforced.
        tolerance: the least lead of the right digit's logit in training. In evaluation it is 0, so
            that ``kept/violated`` is the share of samples that were lost.
        training: optimizer and schedule.

    >>> from lightning.pytorch import Trainer
    >>> from pl_pointwise import Pointwise
    >>> from pl_pointwise.tasks.digits import DigitsDataModule, DigitsModule
    >>> module, data = DigitsModule(Pointwise()), DigitsDataModule(batch_size=64)
    >>> trainer = Trainer(max_epochs=30, accelerator="cpu", logger=False)
    >>> trainer.fit(module, data)  # doctest: +SKIP
    """

    def __init__(
        self,
        formulation: Formulation | None,
        tolerance: float = 1.0,
        training: Training | None = None,
    ) -> None:
        super().__init__(
            formulation=formulation,
            constraints={"kept": Constraint(at_least=tolerance)},
            evaluation_constraints={"kept": Constraint(at_least=0.0)},
            training=training or Training(),
        )
        self.network = deepcopy(old_model())

    def forward(self, batch: Any) -> Tensor:
        return self.network(batch["image"])

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:  # (B,)
        return cross_entropy(outputs, batch["label"], reduction="none")

    # (B,) each
    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        right = one_hot(batch["label"], 10).bool()
        return {
            "kept": outputs[right] - outputs.masked_fill(right, -torch.inf).amax(dim=1)
        }

    # which samples each term applies to
    def membership(self, batch: Any) -> dict[str, Tensor]:
        return {"objective": batch["rotated"], "kept": ~batch["rotated"]}

    def evaluation_metrics(self) -> dict[str, Metric]:
        return {"accuracy_rotated": MeanBySample()}

    def update_evaluation_metrics(
        self,
        metrics: dict[str, Metric],
        outputs: Tensor,
        batch: Any,
        real: Tensor,
        stage: str,
    ) -> None:
        rotated = batch["rotated"] & real
        right = (outputs.argmax(dim=1) == batch["label"]).float()
        metrics["accuracy_rotated"].update(batch["index"][rotated], right[rotated])

    def export(self, path: str | Path) -> Path:
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        save_model(self.network, str(folder / "model.safetensors"))
        write_card(
            self,
            folder,
            library_name="pytorch",
            pipeline_tag="image-classification",
            base_model=None,  # None on the hub.
            usage=USAGE,
        )
        return folder


def digits_in(path: str) -> tuple[Tensor, Tensor]:
    """Images and labels of a CSV file: a line each, 64 numbers from 0 to 16, then the digit."""
    try:
        lines = torch.tensor(np.loadtxt(path, delimiter=",", ndmin=2)).reshape(-1, 65)
    except (ValueError, RuntimeError) as error:
        raise DataError(
            f"{path}: {error}. Give lines of 64 pixels and a digit."
        ) from error
    return lines[:, :64].float() / 16, lines[:, 64].long()


class DigitsDataModule(PointwiseDataModule):
    """Every digit rotated by 90°, and upright those that the old model got right.

    Args:
        test_file: other test data, for ``pl-pointwise check`` and ``monitor``: see `digits_in`.
        options: of `PointwiseDataModule`.

    >>> from pl_pointwise.tasks.digits import DigitsDataModule
    >>> data = DigitsDataModule(batch_size=64)
    >>> data.setup("fit")
    >>> sorted(data.datasets["train"][0])
    ['image', 'label', 'rotated']
    """

    def __init__(self, test_file: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.test_file = test_file

    def setup(self, stage: str) -> None:
        tests = {"test": digits_in(self.test_file)} if self.test_file else {}
        for split, (images, labels) in (digits() | tests).items():
            right = old_model()(images).argmax(dim=1) == labels
            turned = images.view(-1, 8, 8).rot90(dims=(1, 2)).flatten(1)
            parts = [(images[right], labels[right], False), (turned, labels, True)]
            rows = []
            for of_part, labels_of_part, rotated in parts:
                for image, label in zip(of_part, labels_of_part, strict=True):
                    rows.append({"image": image, "label": label, "rotated": rotated})
            self.datasets[split] = rows

    def describe(self, index: int, dataset: str = "train") -> dict[str, Any]:
        """The sample as a picture, for reports."""
        row = self.datasets[dataset][index]
        return row | {"image": row["image"].view(8, 8), "rotated": str(row["rotated"])}
