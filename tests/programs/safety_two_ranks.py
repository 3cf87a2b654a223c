"""Module and data of a small fit on the tiny Llama; run as a rank by safety/test_ranks.py."""

from __future__ import annotations

from pl_pointwise import Optimization, Pointwise, Training
from pl_pointwise.tasks import Generation, Lora, Policy, SafetyDataModule, SafetyModule
from pl_pointwise.tasks.safety.module import SafetyEvaluation
from tests.programs.task_ranks import main


def build(model: str, files: dict[str, str], ranks: int) -> tuple[SafetyModule, SafetyDataModule]:
    """Batches of two prompts over all ranks, and generated answers in the test."""
    module = SafetyModule(
        Policy(
            model,
            lora=Lora(lora_dropout=0.0),
            generation=Generation(max_new_tokens=4, sample=True),
        ),
        formulation=Pointwise(alpha=1.0, dual_lr=0.5),
        comply_tolerance=-6.5,
        evaluation=SafetyEvaluation(answer_in=["test"]),
        training=Training(Optimization(learning_rate=1e-3), gradient_clip_val=1.0),
    )
    data = SafetyDataModule(
        source="files",
        unsafe_schema="labelled",
        batch_size=2 // ranks,
        eval_batch_size=4 // ranks,
        **files,  # type: ignore[arg-type]
    )
    return module, data


if __name__ == "__main__":
    main(build)
