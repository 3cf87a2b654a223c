"""Module and data of a small fit on the tiny Llama; run as a rank by test_ranks.py."""

from __future__ import annotations

from pl_pointwise import Optimization, Pointwise
from pl_pointwise.tasks import When2CallDataModule, When2CallModule
from pl_pointwise.tasks.language_model.loading import Lora
from tests.programs.task_ranks import main


def build(
    model: str, files: dict[str, str], ranks: int
) -> tuple[When2CallModule, When2CallDataModule]:
    """Batches of four prompts over all ranks, the reference cached."""
    module = When2CallModule(
        model,
        formulation=Pointwise(alpha=1.0, dual_lr=0.5),
        lora=Lora(dropout=0.0),
        optimization=Optimization(learning_rate=1e-3),
        reference_cache="memory",
    )
    data = When2CallDataModule(
        model, source="files", group_rejected=True, batch_size=4 // ranks, **files
    )
    return module, data


if __name__ == "__main__":
    main(build)
