"""The re-ranker: its forward pass skips nothing but padding, and it learns what it is asked."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import seed_everything
from sklearn.metrics import log_loss
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
)

from pl_pointwise import Optimization, Pointwise, Training
from pl_pointwise.data import PADDING
from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.lengths import like_length_groups
from pl_pointwise.tasks.reranker.data import RerankerDataModule
from pl_pointwise.tasks.reranker.lambda_loss import length_biased_lambda_loss
from pl_pointwise.tasks.reranker.module import RerankerModule
from tests.tasks.conftest import before_and_after, build_model, quiet_trainer
from tests.tasks.reranker.conftest import (
    OWN,
    SIZES,
    ms_marco_rows,
    save_tiny_cross_encoder,
)


@pytest.fixture
def model(tiny_cross_encoder_dir: Path) -> str:
    return str(tiny_cross_encoder_dir)


def batch_of(
    lengths: list[list[int]], token_types: bool = True, seed: int = 0
) -> dict[str, Any]:
    """A batch of random tokens with pairs of these lengths; 0 is no candidate."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor(lengths)
    inside = torch.arange(int(tokens.max())) < tokens[..., None]
    ids = torch.randint(3, 60, inside.shape, generator=generator) * inside
    batch = {
        "index": torch.arange(len(lengths)),
        "input_ids": ids,
        "lengths": tokens,
        "candidates": tokens > 0,
        "passage_lengths": (tokens - 5).clamp(min=0).float(),
    }
    if token_types:
        batch["token_type_ids"] = (torch.arange(ids.shape[-1]) > 4).long() * inside
    return batch


RAGGED = [[9, 31, 4, 17, 66], [5, 0, 58, 23, 4], [101, 12, 12, 0, 0]]


def padded_scores(module: RerankerModule, batch: dict[str, Any]) -> Tensor:
    """The plain way: every pair, absent ones too, in one pass padded to the longest of all."""
    shape = batch["lengths"].shape
    inputs = {
        k: batch[k].flatten(0, 1) for k in ("input_ids", "token_type_ids") if k in batch
    }
    mask = (
        torch.arange(batch["input_ids"].shape[-1]) < batch["lengths"].flatten()[:, None]
    )
    mask[~batch["candidates"].flatten(), 0] = True  # something to attend to
    logits = module.model(**inputs, attention_mask=mask.long()).logits
    scores = logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]
    return torch.where(batch["candidates"], scores.view(shape), 0.0)


@pytest.mark.parametrize("num_labels", [1, 2])
@pytest.mark.parametrize("kind", OWN)
def test_forward_equals_the_fully_padded_forward_in_value_and_gradient(
    kind: str, num_labels: int, tmp_path: Path
) -> None:
    """Absent pairs in the middle of a row of candidates, and several pairs of one length."""
    name = save_tiny_cross_encoder(tmp_path, num_labels, kind == "bert", kind)
    # differences are not rounding
    module = RerankerModule(str(name), dropout=0.0).train().double()
    batch = batch_of(RAGGED, token_types=kind == "bert")
    weights = torch.linspace(-1, 2, 15).view(3, 5)

    def gradients(scores: Tensor) -> list[Tensor]:
        parameters = list(module.model.parameters())
        found = torch.autograd.grad(
            (weights * scores).sum(), parameters, allow_unused=True
        )
        return [torch.zeros(1) if gradient is None else gradient for gradient in found]

    scores, expected = module(batch), padded_scores(module, batch)
    assert module.scoring_method == "packed"
    assert scores.std() > 0.1  # guards the comparison: the pairs do differ
    torch.testing.assert_close(scores, expected, atol=1e-9, rtol=0)
    pairs = list(zip(gradients(scores), gradients(expected), strict=True))
    assert sum(float(gradient.abs().sum()) for gradient, _ in pairs) > 0
    for gradient, reference in pairs:
        torch.testing.assert_close(gradient, reference, atol=1e-9, rtol=1e-9)


@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=30), st.sampled_from([0, 20, 500])
)
def test_groups_hold_every_pair_once_and_pad_less_than_a_pass_costs(
    sizes: list[int], cost: int
) -> None:
    lengths = torch.tensor(sizes)
    groups = like_length_groups(lengths, cost)
    assert sorted(torch.cat(groups).tolist()) == list(range(len(sizes)))
    for group in groups:
        assert int((lengths[group].max() - lengths[group]).sum()) <= cost
    # The first of the next would have been too much.
    for shorter, longer in pairwise(groups):
        assert int((lengths[longer].min() - lengths[shorter]).sum()) > cost


def test_an_encoder_that_cannot_be_packed_is_padded_in_groups(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It attends by other means; the log says so, and the model is as it was loaded."""
    config = CONFIG_MAPPING["deberta-v2"](vocab_size=120, num_labels=1, **SIZES)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    module = RerankerModule(str(tmp_path), dropout=0.0).eval()
    batch = batch_of(RAGGED, token_types=False)
    with torch.no_grad():
        scores = module(batch)
    assert module.scoring_method == "grouped"
    assert "not packed" in caplog.text
    torch.testing.assert_close(
        scores, padded_scores(module, batch), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "mistral"])
def test_a_decoder_is_packed_too(kind: str, tmp_path: Path) -> None:
    """Causal, with windows far shorter than the pairs, and fewer heads of keys."""
    own = {"sliding_window": 6, "head_dim": 16}
    if kind == "gemma3_text":
        own["layer_types"] = [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
        ]
    model = build_model(kind, vocab_size=120, **own)
    model.save_pretrained(tmp_path)
    module = RerankerModule(str(tmp_path), dropout=None).train().double()
    batch = batch_of(RAGGED, token_types=False)
    weights = torch.linspace(-1, 2, 15).view(3, 5)
    found = []
    for scores in (module(batch), padded_scores(module, batch)):
        gradients = torch.autograd.grad(
            (weights * scores).sum(), list(module.model.parameters()), allow_unused=True
        )
        found.append([scores, *(each for each in gradients if each is not None)])
    assert module.scoring_method == "packed"
    assert found[0][0].std() > 0.01
    for value, expected in zip(*found, strict=True):
        # Norms in float32.
        torch.testing.assert_close(value, expected, atol=1e-6, rtol=1e-5)


def test_a_batch_without_any_pair_gives_zeros(model: str) -> None:
    batch = batch_of([[1, 1]])
    batch["lengths"] = torch.zeros(1, 2, dtype=torch.long)
    assert torch.equal(RerankerModule(model)(batch), torch.zeros(1, 2))


def test_scores_under_bf16_autocast_are_float32_and_the_objective_too(
    tmp_path: Path,
) -> None:
    module = RerankerModule(str(save_tiny_cross_encoder(tmp_path, 2)), dropout=0.0)
    batch = batch_of(RAGGED)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = module(batch)
        objective = module.objective(scores, batch)
    assert scores.dtype == objective.dtype == torch.float32


# Loading --------------------------------------------------------------------------------------


def test_a_head_of_three_labels_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"head of 3 labels.*two with score = logit 1 − logit 0"
    ):
        RerankerModule(str(save_tiny_cross_encoder(tmp_path, 3)))


def test_a_new_head_depends_on_the_seed_of_the_run_alone(tmp_path: Path) -> None:
    """Methods compared at one seed start alike, however much chance was used before."""
    BertModel(BertConfig(vocab_size=60, **SIZES)).save_pretrained(tmp_path)

    def head(seed: int, draws: int) -> Tensor:
        seed_everything(seed, verbose=False)
        torch.rand(draws)
        before = torch.get_rng_state()
        module = RerankerModule(str(tmp_path))
        assert torch.equal(before, torch.get_rng_state())  # and building draws none
        assert module.model.config.num_labels == 1
        return module.model.classifier.weight.detach()

    assert torch.equal(head(1, 0), head(1, 5))
    assert not torch.equal(head(1, 0), head(2, 0))


def test_dropout_reaches_every_dropout_of_the_model(tmp_path: Path) -> None:
    module = RerankerModule(
        str(save_tiny_cross_encoder(tmp_path, 1, False, "modernbert")), dropout=0.05
    )
    layers = [m.p for m in module.modules() if isinstance(m, torch.nn.Dropout)]
    assert layers
    assert set(layers) == {0.05}
    assert module.model.config.attention_dropout == 0.05
    module.train()
    batch = batch_of(RAGGED, token_types=False)
    assert not torch.equal(module(batch), module(batch))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dropout": 1.1}, "dropout probability"),
        ({"objective": "lenght"}, "objective='lenght'"),
    ],
)
def test_an_argument_out_of_range_is_named(
    arguments: dict[str, Any], message: str, model: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RerankerModule(model, **arguments)


# Terms ----------------------------------------------------------------------------------------


def test_terms_are_the_loss_the_margins_and_who_carries_them(model: str) -> None:
    module = RerankerModule(model, top_k=2, objective_candidates="negatives")
    batch = batch_of(RAGGED)
    scores = torch.randn(3, 5)
    expected = length_biased_lambda_loss(
        scores, batch["passage_lengths"], batch["candidates"], 2, "negatives"
    )
    assert torch.equal(module.objective(scores, batch), expected)
    margins = module.constraint_values(scores, batch)["relevance"]
    assert margins.shape == (3, 4)
    assert margins[1, 2] == scores[1, 0] - scores[1, 3]
    members = module.membership(batch)
    assert members["objective"].tolist() == [True] * 3
    assert members["relevance"].tolist() == [
        [True, True, True, True],
        [False, True, True, True],
        [True, True, False, False],
    ]


def test_monobert_is_the_binary_log_loss_of_each_querys_pairs(model: str) -> None:
    module = RerankerModule(model, objective="monobert")
    batch = batch_of(RAGGED)
    scores = torch.randn(3, 5, dtype=torch.float64) * 3
    found = module.objective(scores, batch)
    for row in range(3):
        present = batch["candidates"][row]
        probabilities = scores[row][present].sigmoid().numpy()
        labels = np.eye(1, len(probabilities))[0]
        expected = log_loss(labels, probabilities, labels=[0, 1])
        assert found[row].item() == pytest.approx(expected, rel=1e-9)


# Through the trainer --------------------------------------------------------------------------


@pytest.fixture
def data(of_files: Callable[..., RerankerDataModule]) -> RerankerDataModule:
    """Thirteen training queries in batches of four: the last batch is smaller, and K = 3."""
    rows = ms_marco_rows(20)
    return of_files(
        {"train": rows[:13], "val": rows[13:]}, model_name=None, max_length=None
    )


FAST = Training(Optimization(learning_rate=2e-3))


def module_of(folder: Path, *arguments: Any, **options: Any) -> RerankerModule:
    seed_everything(0, verbose=False)
    defaults: dict[str, Any] = {"max_length": 32, "dropout": 0.0, "training": FAST}
    return RerankerModule(str(folder), *arguments, **{**defaults, **options})


def test_training_learns_the_margins_and_keeps_one_multiplier_for_each_negative(
    data: RerankerDataModule, tiny_cross_encoder_dir: Path, tmp_path: Path
) -> None:
    module = module_of(
        tiny_cross_encoder_dir, Pointwise(alpha=1.0, dual_lr=0.1), tolerance=1.0
    )
    before, after = before_and_after(module, data, tmp_path, max_epochs=20)
    # not the share: where length pulls, violations end close to 0
    key = "train/relevance/cvar95"
    assert before[key] > 3
    assert after[key] < 0.5
    assert after["train/mrr@10"] == 1.0
    multipliers = module.multipliers["relevance"]
    assert multipliers.shape == (13, 3)
    assert (multipliers > 0).any()


def test_dropout_is_on_while_training_and_off_while_evaluating(
    data: RerankerDataModule, tiny_cross_encoder_dir: Path, tmp_path: Path
) -> None:
    """transformers loads models in evaluation mode, and Lightning keeps the mode it finds."""
    module = module_of(tiny_cross_encoder_dir, dropout=0.5)
    modes: dict[bool, set[bool]] = {True: set(), False: set()}
    module.model.register_forward_pre_hook(
        lambda model, _: modes[module.trainer.training].add(model.training)
    )
    quiet_trainer(tmp_path, max_epochs=2).fit(module, data)
    assert modes == {True: {True}, False: {False}}


def test_the_data_take_the_input_format_from_the_module(
    data: RerankerDataModule, tiny_cross_encoder_dir: Path, tmp_path: Path
) -> None:
    """Also anew, when they are used with a module of another format; else what is there stays."""
    for longest in (32, 9):
        module = module_of(tiny_cross_encoder_dir, max_length=longest)
        quiet_trainer(tmp_path, max_steps=1).fit(module, data)
        batches = list(data.train_dataloader())
        assert max(int(batch["lengths"].max()) for batch in batches) <= longest
    kept = data.datasets["train"]
    quiet_trainer(tmp_path, max_steps=1).fit(module, data)
    assert data.datasets["train"] is kept
    module = module_of(
        tiny_cross_encoder_dir, max_length=9, template="snow {query} {passage}"
    )
    quiet_trainer(tmp_path).validate(module, data, verbose=False)
    tokenizer = AutoTokenizer.from_pretrained(tiny_cross_encoder_dir)
    text = tokenizer.decode(data.datasets["val"][0]["input_ids"][0])
    assert text.startswith("[CLS] snow what is")


@pytest.mark.parametrize(
    ("option", "own"),
    [("model_name", "another"), ("max_length", 31), ("template", "{query} {passage}")],
)
def test_data_of_another_input_format_are_refused(
    option: str,
    own: Any,
    data: RerankerDataModule,
    tiny_cross_encoder_dir: Path,
    tmp_path: Path,
) -> None:
    """Else the model would train on other tokens than its export makes."""
    module = module_of(tiny_cross_encoder_dir)
    files = {f"{name}_file": data.files[name] for name in ("train", "val")}
    other = RerankerDataModule(**{option: own}, source="files", negatives=3, **files)
    with pytest.raises(DataError, match=f"^{option}: .* Give it to the module alone"):
        quiet_trainer(tmp_path, max_steps=1).fit(module, other)


def test_a_token_that_the_model_has_no_row_for_is_refused(
    data: RerankerDataModule, tiny_cross_encoder_dir: Path, tmp_path: Path
) -> None:
    """In the first batch there would be torch's IndexError."""
    module = module_of(tiny_cross_encoder_dir)
    module.model.resize_token_embeddings(9)
    with pytest.raises(
        DataError, match=r"line 1: the tokenizer writes token .* model knows 9\."
    ):
        quiet_trainer(tmp_path, max_steps=1).fit(module, data)


def test_predictions_order_the_candidates_given_and_skip_rows_that_fill_the_batch(
    tiny_cross_encoder_dir: Path,
) -> None:
    module = module_of(tiny_cross_encoder_dir).eval()
    batch = batch_of([[9, 5, 12, 7], [4, 8, 0, 0], [4, 8, 6, 0]])
    batch["index"] = torch.tensor([7, 3, PADDING])
    batch["query_id"] = ["a", None, "b"]
    with torch.no_grad():
        scores = module(batch)
        first, second = module.predict_step(batch)
    assert (first["index"], first["query_id"], second["index"]) == (7, "a", 3)
    assert first["scores"] == pytest.approx(scores[0].tolist())
    assert first["order"] == np.argsort(-scores[0].numpy()).tolist()
    assert sorted(second["order"]) == [0, 1]
    assert len(second["scores"]) == 2
    assert second["scores"][second["order"][0]] == max(second["scores"])


@pytest.mark.parametrize(
    ("kind", "most"), [("bert", 40), ("xlm-roberta", 38), ("modernbert", 512)]
)
def test_pairs_are_no_longer_than_the_models_positions(
    kind: str, most: int, tiny_tokenizer_dir: Path, tmp_path: Path
) -> None:
    """XLM-R counts its own from behind the pad token: 514 positions are 512."""
    options = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    options |= {
        "num_attention_heads": 2,
        "vocab_size": 200,
        "max_position_embeddings": 40,
    }
    config = CONFIG_MAPPING[kind](**options, pad_token_id=1, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    module = RerankerModule(str(tmp_path)).eval()
    assert module.max_length == most
    ids = torch.full((1, 1, min(most, 60)), 5)
    module({"input_ids": ids, "lengths": torch.tensor([[ids.shape[-1]]])})
