"""Unsafe answers that the data lack: generated once by the model before training, and kept.

Safe-DPO prefers a refusal to an unsafe answer, and some data have prompts only. The model as it is
before training, which is the reference, is then asked for the other answer. One that refuses
already, by the keyword rule, or says nothing is no unsafe answer: its prompt has no pair.

The answers of one model under one setting are a file of JSON lines {"prompt", "answer", "cut"},
the answer without a thought, ``cut`` where it ran into the length limit. The file's name is a
digest of model, setting and chat template, so that another of them reads none of these; a local
model is told apart by its files' names, sizes and times.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_info

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.models import model_source
from pl_pointwise.tasks.common.records import digest
from pl_pointwise.tasks.language_model.conversations import ConversationEncoder
from pl_pointwise.tasks.language_model.generation import Generation, generate_answers
from pl_pointwise.tasks.language_model.loading import load_language_model
from pl_pointwise.tasks.language_model.refusals import is_refusal
from pl_pointwise.tasks.language_model.truncation import fit_prompt

from .records import UNSAFE, Record


class UnsafeAnswers:
    """Generated answers by prompt, on disk.

    Args:
        folder: where their files are.
        model_name: who answers: a name on the hub, a folder, or ``package:NAME/FOLDER``.
        revision: on the hub.
        settings: how it answers.
        max_prompt_length: the texts of longer prompts lose their beginning.
    """

    def __init__(
        self,
        folder: Path,
        model_name: str,
        revision: str | None,
        settings: Generation,
        max_prompt_length: int,
    ) -> None:
        self.folder = folder
        self.model_name, self.revision = model_name, revision
        self.settings, self.max_prompt_length = settings, max_prompt_length

    def path(self, encoder: ConversationEncoder) -> Path:
        """The file for this model and these settings."""
        source = model_source(self.model_name)
        files = [
            (path.name, path.stat().st_size, path.stat().st_mtime_ns)
            for path in sorted(Path(source).glob("*.safetensors"))
        ]
        template = encoder.tokenizer.chat_template
        settings = asdict(self.settings)
        parts = [source, self.revision, files, settings, template, self.max_prompt_length]
        if encoder.template_arguments or encoder.scaffold:
            parts += [encoder.template_arguments, encoder.scaffold]
        name = digest(*parts)
        return self.folder / f"{name[:20]}.jsonl"

    def read(self, encoder: ConversationEncoder) -> dict[str, tuple[str, bool]]:
        """(answer, whether it was cut) by prompt; a line that was cut short is passed over."""
        path = self.path(encoder)
        found = {}
        # Of bytes: an answer may hold what splits the lines of a text.
        for line in path.read_bytes().split(b"\n") if path.is_file() else []:
            try:
                row = json.loads(line)
                found[row["prompt"]] = (row["answer"], row["cut"])
            except (ValueError, LookupError, TypeError):  # the run was stopped while it wrote
                continue
        return found

    def complete(
        self,
        records: Sequence[Record],
        encoder: ConversationEncoder,
        device: torch.device,
        batch_size: int,
    ) -> None:
        """Generate the answers that are not there yet; a stopped run goes on where it stood."""
        known = self.read(encoder)
        missing = [record for record in records if record.text not in known]
        if not missing:
            return
        path = self.path(encoder)
        path.parent.mkdir(parents=True, exist_ok=True)
        rank_zero_info(f"Generating {len(missing):,} unsafe answers into {path}.")
        model = load_language_model(self.model_name, revision=self.revision).to(device).eval()
        encoded = [(self._encode(record, encoder), record.text) for record in missing]
        encoded.sort(key=lambda each: len(each[0]))
        with path.open("a", encoding="utf-8") as file:
            if path.stat().st_size:
                file.write("\n")  # behind a line that may be cut short
            for start in range(0, len(encoded), batch_size):
                part = encoded[start : start + batch_size]
                answers = generate_answers(model, encoder, [ids for ids, _ in part], self.settings)
                for (_, prompt), text, cut in zip(part, answers.texts, answers.cut, strict=True):
                    row = {"prompt": prompt, "answer": text, "cut": cut}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()

    def _encode(self, record: Record, encoder: ConversationEncoder) -> list[int]:
        """Token ids of what is asked.

        Raises:
            DataError: it does not fit, however short.
        """
        where, limit = record.where, self.max_prompt_length
        fitted = fit_prompt(encoder, record.messages, [], where, limit)
        if fitted is None:
            raise DataError(
                f"{where}: no part of the prompt fits into max_prompt_length={limit} behind what "
                "the chat template and a system turn take. Raise max_prompt_length."
            )
        rendered = encoder.prompt(fitted, [], where)
        return encoder.encode([rendered], [[]])[0][0]

    def added_to(
        self, records: Iterable[Record], lacking: set[str], encoder: ConversationEncoder
    ) -> list[Record]:
        """The records, the answers added to those whose prompts lack one; says what was found.

        Raises:
            DataError: a prompt whose answer was not generated.
        """
        known = self.read(encoder)
        absent = lacking.difference(known)
        if absent:
            raise DataError(
                f"{self.path(encoder)}: {len(absent):,} of {len(lacking):,} unsafe answers are not "
                "there. Call prepare_data() first, which a Trainer does."
            )
        useless = {prompt for prompt in lacking if _says_nothing_unsafe(known[prompt][0])}
        cut = sum(known[prompt][1] for prompt in lacking)
        rank_zero_info(
            f"train: {len(lacking):,} unsafe answers are generated ones. {len(useless):,} of them "
            f"refuse or are empty, so their prompts have no pair; {cut:,} were cut at "
            f"{self.settings.max_new_tokens} tokens."
        )
        return [
            replace(record, responses=(*record.responses, (UNSAFE, known[record.text][0])))
            if record.unsafe and record.text in lacking - useless and UNSAFE not in record.roles
            else record
            for record in records
        ]


def _says_nothing_unsafe(answer: str) -> bool:
    return not answer.strip() or is_refusal(answer)
