"""Re-ranking with length: a cross-encoder that puts the right passage first, then short ones.

A query q has one positive passage p and K negatives n; the model scores each pair, s_d = π(d | q).

    minimise   the length-biased ranking loss Λ of the scores     (lambda_loss.py)
    subject to s_p − s_n ≥ ε  for every query and each of its negatives

so relevance is a requirement of every single pair, and length is what is optimised beyond it.

A batch is :class:`~.data.RerankerDataModule`'s, of C = 1 + K candidates a query, candidate 0 the
positive.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn.functional import logsigmoid
from torchmetrics import MeanMetric
from transformers import AutoModelForSequenceClassification

from pl_pointwise import (
    Constraint,
    Formulation,
    Optimization,
    PointwiseModule,
    Training,
)
from pl_pointwise.errors import one_of
from pl_pointwise.evaluation import MeanBySample
from pl_pointwise.export.folder import replaced_folder
from pl_pointwise.lagrangian.terms import PADDING
from pl_pointwise.model_card import write_card
from pl_pointwise.task import Batch, Metrics
from pl_pointwise.tasks.common.models import check_weights, most_tokens

from .export import USAGE, exported_tokenizer, save_with_one_label
from .lambda_loss import CandidateSet, length_biased_lambda_loss
from .loading import Attention, load_cross_encoder, load_tokenizer
from .metrics import NAMES, ranking_metrics
from .scoring import ScoringMethod, choose_scoring_method, scores_of
from .template import Template

PAPER_TRAINING = Training(
    Optimization(
        learning_rate=2e-5, weight_decay=0.0, schedule="linear", warmup_ratio=0.1
    )
)


class RerankerModule(PointwiseModule):
    """A cross-encoder trained for short passages, subject to a margin on relevance.

    Any model that `AutoModelForSequenceClassification` loads from safetensors will do: a one-label
    head scores with its logit, a two-label head with logit 1 − logit 0, and an encoder without a
    head gets a new one-label head; and any causal model that answers in a word (``head``). To
    evaluate it before training, run `test` without `fit`.

    Args:
        model_name: a name on the hub, a folder, or ``package:NAME/FOLDER``; of a PEFT adapter its
            base with the adapter merged into it.
        formulation: how the margin is enforced; None for plain training on the objective.
        tolerance: ε, the margin s_p − s_n each negative has to keep.
        evaluation_tolerance: ε that violations in validation and test are measured against; None
            takes `tolerance`. Give every method that is compared the same.
        objective: "length" for the length-biased Λ, or "monobert" for binary cross-entropy on
            each pair, which trains relevance alone (with formulation None: the baseline).
        objective_candidates: candidates that Λ orders by length, "all" (as the paper's formula)
            or the "negatives" alone.
        top_k: K of Λ, the ranks that count in it.
        dropout: probability for every dropout of the model; None leaves the model's own.
        attention: attention implementation; None leaves the choice to transformers.
        max_length: the most tokens of a pair, as in ``CrossEncoder``; of longer pairs the longer
            text is cut first; at most what the model has positions for. The data module takes it,
            model_name and template from here.
        template: one text instead of a pair, such as "Query: {query}\\nSentence: {passage}"; long
            passages are cut, and what stands behind them stays.
        head: of a causal model that answers in a word, the words whose logits are the score, as
            ["yes", "no"] of Qwen3-Reranker, ["1", "0"] of mxbai-rerank v2, ["Yes"] of bge-v2-gemma.
        instruction: what stands for {instruction} in the template, where a record has none of its
            own and in the export.
        training: how it is trained; by default as in the paper.
    """

    host_keys = ("index", "lengths")
    shared_objective = "length_objective"

    def __init__(
        self,
        model_name: str,
        formulation: Formulation | dict[str, Formulation] | None = None,
        tolerance: float = 1.0,
        evaluation_tolerance: float | None = None,
        objective: Literal["length", "monobert"] = "length",
        objective_candidates: CandidateSet = "all",
        top_k: int = 3,
        dropout: float | None = None,
        attention: Attention | None = None,
        max_length: int = 512,
        template: str | None = None,
        head: list[str | bool | int] | None = None,
        instruction: str | None = None,
        training: Training = PAPER_TRAINING,
    ) -> None:
        if evaluation_tolerance is None:
            evaluation_tolerance = tolerance
        super().__init__(
            formulation=formulation,
            constraints={"relevance": Constraint(at_least=tolerance)},
            evaluation_constraints={
                "relevance": Constraint(at_least=evaluation_tolerance)
            },
            training=training,
        )
        one_of("objective", objective, ("length", "monobert"))
        one_of("objective_candidates", objective_candidates, ("all", "negatives"))
        if template is not None:
            # A template without a field it needs is refused here, before weights are loaded.
            Template.parse(template).filled(instruction)
        # Not self.objective, which is the method.
        self.trained_on = objective
        self.top_k = top_k
        self.objective_candidates: CandidateSet = objective_candidates
        self.model_name = model_name
        self.max_length = max_length
        self.template = template
        self.instruction = instruction
        # Chosen with the first batch, on which the packed method is compared with the plain one.
        self.scoring_method: ScoringMethod | Literal["auto"] = "auto"
        self.model = load_cross_encoder(model_name, dropout, attention, head)
        # BERT has 512 positions: a longer pair would be an index error in its embeddings.
        most = most_tokens(self.model)
        if max_length > most:
            rank_zero_info(
                f"{model_name} has positions for {most} tokens: max_length is {most}."
            )
            self.max_length = int(most)

    def forward(self, batch: Batch) -> Tensor:
        """Scores of all pairs, (B, C) float32 or wider; 0, without a gradient, where none is."""
        # RoBERTa and ModernBERT tell query and passage apart without token types.
        names = [name for name in ("input_ids", "token_type_ids") if name in batch]
        inputs: dict[str, Tensor] = {name: batch[name].flatten(0, 1) for name in names}
        device = inputs["input_ids"].device
        shape = batch["lengths"].shape
        lengths = batch["lengths"].flatten().cpu()
        # 0 tokens: a record with fewer negatives than the batch has columns, or none at all.
        present = lengths.nonzero()[:, 0]
        if len(present) == 0:
            return torch.zeros(shape, device=device)
        if self.scoring_method == "auto":
            self.scoring_method = choose_scoring_method(
                self.model, inputs, lengths, present
            )
        # The method was chosen where the first batch was; packed rows are slower on a GPU.
        method = self.scoring_method if device.type == "cpu" else "grouped"
        scores = scores_of(method, self.model, inputs, lengths, present)
        places = present.to(device, non_blocking=True)
        return scores.new_zeros(len(lengths)).index_copy(0, places, scores).view(shape)

    def objective(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Λ of each query, or the mean over its pairs of the binary cross-entropy, (B,)."""
        candidates: Tensor = batch["candidates"]
        if self.trained_on == "monobert":
            return binary_cross_entropy(outputs, candidates)
        return length_biased_lambda_loss(
            outputs,
            batch["passage_lengths"],
            candidates,
            self.top_k,
            self.objective_candidates,
        )

    def constraint_values(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """For "relevance" the margins s_p − s_n, (B, K)."""
        return {"relevance": outputs[:, :1] - outputs[:, 1:]}

    def membership(self, batch: Batch) -> dict[str, Tensor]:
        """Every query has the objective, and one constraint for each of its negatives."""
        candidates: Tensor = batch["candidates"]
        return {
            "objective": torch.ones_like(candidates[:, 0]),
            "relevance": candidates[:, :1] & candidates[:, 1:],
        }

    def evaluation_metrics(self) -> Metrics:
        """Means over queries, of Λ whatever was trained on, and the share of pairs out of order."""
        of_queries = {name: MeanBySample() for name in (*NAMES, "length_objective")}
        return {**of_queries, "wrong_order": MeanMetric()}

    def update_evaluation_metrics(
        self, metrics: Metrics, outputs: Tensor, batch: Batch, real: Tensor, stage: str
    ) -> None:
        """Add a batch; `real` is false for rows that only fill it."""
        index = batch["index"].to(real.device)[real]
        candidates = batch["candidates"][real]
        scores = outputs.detach()[real]
        lengths = batch["passage_lengths"][real]
        values = ranking_metrics(scores, lengths, candidates)
        values["length_objective"] = length_biased_lambda_loss(
            scores, lengths, candidates, self.top_k, self.objective_candidates
        )
        for name, of_queries in values.items():
            metrics[name].update(index, of_queries)
        margins = self.constraint_values(scores, batch)["relevance"]
        pairs = candidates[:, :1] & candidates[:, 1:]
        # NaN is out of order.
        metrics["wrong_order"].update((~(margins > 0))[pairs].float())

    def predict_step(
        self, batch: Batch, batch_idx: int = 0, dataloader_idx: int = 0
    ) -> list[dict[str, Any]]:
        """One {index, query_id, order, scores} per query; rows that only fill the batch give none.

        `scores` are in the order of the candidates given, `order` has their positions, best first.
        Ties keep the order given, as no candidate is known to be the positive here.
        """
        scores = self(batch).float().cpu()
        candidates = batch["candidates"].cpu()
        results = []
        for row, index in enumerate(batch["index"].tolist()):
            # A row that only fills the batch has its result under its own index.
            if index == PADDING:
                continue
            result: dict[str, Any] = {"index": index}
            if "query_id" in batch:
                result["query_id"] = batch["query_id"][row]
            of_candidates = scores[row][candidates[row]]
            order = of_candidates.argsort(descending=True, stable=True)
            result["order"] = order.tolist()
            result["scores"] = of_candidates.tolist()
            results.append(result)
        return results

    def export(self, path: str | Path) -> Path:
        """Save a folder that `sentence_transformers.CrossEncoder` loads, see `export.py`."""
        template = None if self.template is None else Template.parse(self.template)
        if template is not None:
            template = template.filled(self.instruction)
        tokenizer = exported_tokenizer(
            load_tokenizer(self.model_name), self.max_length, template
        )
        card = {"library_name": "sentence-transformers", "pipeline_tag": "text-ranking"}
        with replaced_folder(Path(path)) as folder:
            save_with_one_label(self.model, folder)
            tokenizer.save_pretrained(folder)
            # A missing weight would be filled at random by the reader, with a warning at most.
            check_weights(AutoModelForSequenceClassification, folder)
            write_card(self, folder, **card, base_model=self.model_name, usage=USAGE)
        return Path(path)


def binary_cross_entropy(scores: Tensor, candidates: Tensor) -> Tensor:
    """monoBERT, (B, C) → (B,): −log σ(s_p) − Σ_n log(1 − σ(s_n)), over the number of candidates."""
    # A model of half precision gives scores of it, and losses are float32 or wider.
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    # σ(−s) is 1 − σ(s): one formula for the positive and its negatives.
    signs = torch.full_like(scores, -1.0)
    signs[:, 0] = 1.0
    losses = torch.where(candidates, -logsigmoid(signs * scores), 0.0)
    # A row without any candidate is 0, and not 0 / 0.
    return losses.sum(dim=1) / candidates.sum(dim=1).clamp(min=1)
