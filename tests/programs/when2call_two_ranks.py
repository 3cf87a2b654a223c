"""Module and data of a small fit on the tiny Llama; run as a rank by test_ranks.py."""

from __future__ import annotations

from pl_pointwise import Optimization, Pointwise, Training
from pl_pointwise.tasks import Lora, Policy, When2CallDataModule, When2CallModule
from tests.programs.task_ranks import main


def build(
    model: str, files: dict[str, str], ranks: int
) -> tuple[When2CallModule, When2CallDataModule]:
    """Batches of four prompts over all ranks, the reference cached."""
    module = When2CallModule(
        Policy(model, lora=Lora(lora_dropout=0.0), reference_cache="memory"),
        formulation=Pointwise(alpha=1.0, dual_lr=0.5),
        training=Training(Optimization(learning_rate=1e-3)),
    )
    data = When2CallDataModule(source="files", group_rejected=True, batch_size=4 // ranks, **files)
    return module, data


if __name__ == "__main__":
    main(build)
