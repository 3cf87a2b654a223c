"""The model's own answers in the place of a file's: what it says is what it goes on saying."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning.pytorch.utilities import rank_zero_info

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.records import report_skipped
from pl_pointwise.tasks.language_model.module import LanguageModelModule
from pl_pointwise.tasks.language_model.text.records import Record

TOGETHER = 8  # Prompts that are answered in one batch.


def with_own_answers(records: Sequence[Record], module: LanguageModelModule) -> list[Record]:
    """The records, each answer of role keep as the module's reference writes it now.

    A record whose own answer is empty, or does not end within ``max_new_tokens``, is left out with
    a warning: nobody knows how it ends.
    """
    asked = [i for i, record in enumerate(records) if "keep" in record.roles]
    found: list[Record | None] = list(records)
    problems = list[str]()
    for start in range(0, len(asked), TOGETHER):
        some = asked[start : start + TOGETHER]
        prompts = [{"messages": records[i].messages, "tools": records[i].tools} for i in some]
        for i, answer in zip(some, module.answers_to(prompts, reference=True), strict=True):
            if answer["cut"] or not answer["answer"].strip():
                problems.append(
                    f"{records[i].where}: the model's own answer is empty or does not end within "
                    f"{module.generation.max_new_tokens:,} tokens: raise "
                    "policy.generation.max_new_tokens."
                )
                found[i] = None
                continue
            responses = [
                replace(each, answer=answer["answer"]) if each.role == "keep" else each
                for each in records[i].responses
            ]
            found[i] = replace(records[i], responses=tuple(responses))
    kept = len(asked) - len(problems)
    rank_zero_info(f"The model's own answers are kept of {kept:,} prompts.")
    if asked and not kept:
        raise DataError(problems[0])
    report_skipped("own_answers", problems, kept)
    return [record for record in found if record is not None]
