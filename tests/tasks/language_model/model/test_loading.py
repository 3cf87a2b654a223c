"""The policy of the language tasks: its loading, defaults, checkpoints, the data's model."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from pl_pointwise import Optimization, Pointwise, Training
from pl_pointwise.cli import PointwiseCLI
from pl_pointwise.errors import DataError, TrainingError
from pl_pointwise.tasks import (
    Generation,
    Lora,
    Policy,
    SafetyDataModule,
    SafetyModule,
    When2CallModule,
)
from pl_pointwise.tasks.common.dropout import QuickDropout
from pl_pointwise.tasks.language_model import export as own_export
from pl_pointwise.tasks.language_model.model.loading import load_language_model
from pl_pointwise.tasks.language_model.text.conversations import ConversationEncoder
from pl_pointwise.tasks.safety.module import (
    PAPER_LORA,
    PAPER_SAMPLING,
    SafetyEvaluation,
)
from tests.tasks.conftest import (
    build_tokenizer,
    make_data,
    move_adapters,
    quiet_trainer,
    read_rows,
    written_files,
)
from tests.tasks.safety.conftest import benign_rows, unsafe_rows

SMALL = Lora(r=2, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])


@pytest.fixture
def safety_data(tmp_path: Path) -> SafetyDataModule:
    """Ten benign and six unsafe training prompts, the same held out."""
    rows = {"benign_file": benign_rows(10), "unsafe_file": unsafe_rows(6)}
    rows |= {
        "benign_val_file": rows["benign_file"],
        "unsafe_val_file": rows["unsafe_file"],
    }
    files = written_files(tmp_path, rows)
    return make_data(SafetyDataModule, None, files, unsafe_schema="labelled")


@pytest.mark.parametrize(
    ("task", "lora", "generation", "clip"),
    [
        ("Safety", PAPER_LORA, PAPER_SAMPLING, 1.0),
        ("When2Call", Lora(), Generation(), None),
    ],
)
def test_a_model_name_alone_leaves_the_tasks_defaults(
    task, lora, generation, clip, language_model_folder
) -> None:
    name = str(language_model_folder)
    arguments = ["--model", f"{task}Module", "--model.policy.model_name", name]
    arguments += ["--data", f"{task}DataModule", "--data.source", "files"]
    file = "unsafe_file" if task == "Safety" else "train_file"
    arguments += [f"--data.{file}", "no.jsonl", "--trainer.logger", "false"]
    given = PointwiseCLI(arguments, run=False).model
    kind = SafetyModule if task == "Safety" else When2CallModule
    for module in (given, kind(Policy(name))):
        assert (module.lora, module.generation) == (lora, generation)
        assert module.training_settings.gradient_clip_val == clip
    more = [
        "--model.policy.lora.target_modules",
        "all-linear",
        "--model.policy.lora.r",
        "4",
    ]
    more += ["--model.training.optimization.warmup_ratio", "0.5"]
    module = PointwiseCLI([*arguments, *more], run=False).model
    assert module.lora == Lora(r=4, target_modules="all-linear")
    chosen, usual = (
        module.training_settings.optimization,
        given.training_settings.optimization,
    )
    assert (chosen.warmup_ratio, chosen.learning_rate) == (0.5, usual.learning_rate)


def test_settings_come_back_from_a_checkpoint_of_plain_values(
    language_model_folder, safety_data, tmp_path
) -> None:
    policy = Policy(
        str(language_model_folder),
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
        lora=SMALL,
        generation=Generation(max_new_tokens=7),
        scoring_method="chunked",
        merge_on_export=True,
    )
    training = Training(Optimization(learning_rate=1e-3), micro_batch_size=2)
    evaluation = SafetyEvaluation(refuse_tolerance=-0.3, answer_in=["test"])
    module = SafetyModule(policy, Pointwise(), evaluation=evaluation, training=training)
    run = quiet_trainer(tmp_path, max_steps=1)
    run.fit(module, safety_data)
    run.save_checkpoint(tmp_path / "last.ckpt")
    loaded = SafetyModule.load_from_checkpoint(
        tmp_path / "last.ckpt", weights_only=True
    )
    assert (loaded.policy, loaded.evaluation) == (policy, evaluation)
    assert loaded.training_settings.optimization == training.optimization
    assert loaded.training_settings.micro_batch_size == 2
    assert loaded.evaluation_constraints["refuse"].at_least == -0.3
    assert loaded.tokenizer.chat_template == policy.chat_template


def test_a_subclass_cannot_lose_that_the_frozen_base_is_left_out(
    language_model_folder, data, tmp_path
) -> None:
    """Lightning's users override hooks without super()."""

    class Own(When2CallModule):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["own"] = 1

    module = Own(Policy(str(language_model_folder), lora=SMALL))
    run = quiet_trainer(tmp_path, max_steps=1)
    run.fit(module, data)
    run.save_checkpoint(tmp_path / "last.ckpt")
    names = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert set(names) == {
        name for name, p in module.named_parameters() if p.requires_grad
    }
    assert all("lora_" in name for name in names)
    loaded = Own.load_from_checkpoint(
        tmp_path / "last.ckpt", weights_only=True
    ).state_dict()
    assert all(torch.equal(value, names[name]) for name, value in loaded.items())


TOKENS: dict[str, Any] = {"trainable_token_indices": [5, 6]}
TIED: dict[str, Any] = {"ensure_weight_tying": True}


@pytest.mark.parametrize(
    ("options", "tied", "stays_tied"),
    [
        ({"peft": TOKENS}, False, False),
        ({"peft": TOKENS}, True, True),
        ({"peft": TIED, "modules_to_save": ["embed_tokens"]}, True, True),
        ({"modules_to_save": ["norm"], "peft": {"use_dora": True}}, True, True),
        ({"modules_to_save": ["embed_tokens"]}, True, False),
        ({"target_modules": ["q_proj", "lm_head"]}, True, False),
        (
            {"target_modules": ["q_proj", "embed_tokens"], "peft": {"use_dora": True}},
            True,
            False,
        ),
    ],
)
def test_a_merged_export_is_the_trained_model(
    options, tied, stays_tied, language_model_folder, tmp_path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(language_model_folder)
    config = base.config.to_dict() | {"tie_word_embeddings": tied}
    type(base)(type(base.config).from_dict(config)).save_pretrained(tmp_path / "base")
    build_tokenizer().save_pretrained(tmp_path / "base")
    lora = Lora(
        **{"r": 2, "lora_dropout": 0.0, "target_modules": ["q_proj"], **options}
    )
    module = When2CallModule(
        Policy(str(tmp_path / "base"), lora=lora, merge_on_export=True)
    ).eval()
    move_adapters(module)
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        before = module.model(ids).logits
        exported = AutoModelForCausalLM.from_pretrained(
            module.export(tmp_path / "model")
        ).eval()
        torch.testing.assert_close(exported(ids).logits, before, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(module.model(ids).logits, before, atol=0, rtol=0)
        with module.model.disable_adapter():
            assert (module.model(ids).logits - before).abs().max() > 0.1
    assert exported.config.tie_word_embeddings == stays_tied
    names = set(load_file(tmp_path / "model/model.safetensors"))
    # A reader that ties takes one for both.
    assert ("lm_head.weight" in names) == (not stays_tied)


@pytest.mark.parametrize(
    "peft", [{"lora_bias": True}, {"layer_replication": [[0, 2], [1, 3]]}]
)
def test_what_cannot_be_merged_is_refused_before_training(
    peft, language_model_folder
) -> None:
    lora = Lora(r=2, target_modules=["q_proj"], peft=peft)
    When2CallModule(Policy(str(language_model_folder), lora=lora))
    with pytest.raises(ValueError, match=f"{min(peft)} cannot be merged"):
        When2CallModule(
            Policy(str(language_model_folder), lora=lora, merge_on_export=True)
        )


def test_an_export_that_fails_leaves_the_earlier_one(
    language_model_folder, tmp_path, monkeypatch
) -> None:
    """So does one whose weights would be read as random ones."""
    module = When2CallModule(
        Policy(str(language_model_folder), lora=SMALL, merge_on_export=True)
    )
    folder = module.export(tmp_path / "model")
    (folder / "NOTES.txt").write_text("mine")
    # With it, weights would be looked for.
    (folder / "adapter_config.json").write_text("{}")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    merge = own_export.merged_model

    def incomplete(model: Any) -> Any:
        merged = merge(model)
        layer = merged.model.layers[0].mlp
        layer.own, layer.up_proj = layer.up_proj, None
        return merged

    monkeypatch.setattr(own_export, "merged_model", incomplete)
    with pytest.raises(ValueError, match=r"not written.*up_proj"):
        module.export(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    with pytest.raises(ValueError, match="not written"):
        module.export(tmp_path / "other")
    assert not (tmp_path / "other").exists()
    monkeypatch.undo()
    module.export(folder)
    assert {path.name for path in folder.iterdir()} == before.keys() - {
        "adapter_config.json"
    }
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text("{}")
    with pytest.raises(
        TrainingError, match="has files that are not of an earlier export"
    ):
        module.export(tmp_path / "base")
    assert (tmp_path / "base/config.json").read_text() == "{}"


def test_a_name_instead_of_a_policy_is_explained(language_model_folder) -> None:
    with pytest.raises(ValueError, match=r"is no Policy: write Policy\("):
        When2CallModule(str(language_model_folder))  # type: ignore[arg-type]


# Module and data agree ----------------------------------------------------------------------------


def test_the_data_take_model_and_template_from_the_module(
    language_model_folder, data, tmp_path
) -> None:
    template = "{{ tools }}{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls }}"
    template += "{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    policy = Policy(str(language_model_folder), chat_template=template, lora=SMALL)
    quiet_trainer(tmp_path, max_steps=1).fit(When2CallModule(policy), data)
    assert data.model_name == str(language_model_folder)
    first = data.datasets["train"][0]["prompt"]
    # Used with another module, they are encoded anew.
    other = When2CallModule(Policy(str(language_model_folder), lora=SMALL))
    quiet_trainer(tmp_path, max_steps=1).fit(other, data)
    assert list(first) != list(data.datasets["train"][0]["prompt"])


def test_a_model_of_the_data_alone_is_refused(
    language_model_folder, data, tmp_path
) -> None:
    with pytest.raises(DataError, match=r"policy\.model_name.*or give it model_name"):
        data.setup("fit")
    data.given_name = "other"
    module = When2CallModule(Policy(str(language_model_folder), lora=SMALL))
    with pytest.raises(DataError, match=r"model_name: .*Give it to the module alone"):
        quiet_trainer(tmp_path, max_steps=1).fit(module, data)


def test_a_task_that_no_record_is_about_is_refused(
    language_model_folder, data, tmp_path, monkeypatch
) -> None:
    """It trained the objective alone, the constraints alone, or the wrong responses."""
    for kind in (When2CallModule, type(data)):
        monkeypatch.setattr(kind, "roles", (*When2CallModule.roles[:2], "candidate"))

    class Reversed(When2CallModule):
        roles = When2CallModule.roles[::-1]

    policy = Policy(str(language_model_folder), lora=SMALL)
    kinds = (When2CallModule, When2CallModule, Reversed)
    other, aimless, reversed_ = (
        kind(policy, formulation=Pointwise()) for kind in kinds
    )
    aimless.objective_roles = ("candidate",)
    asked = other.requirements.items()
    other.requirements = {name: replace(each, role="candidate") for name, each in asked}
    needed = "The objective kl applies to no record.*candidate"
    refused = (
        (other, "No constraint applies"),
        (aimless, needed),
        (reversed_, "roles: "),
    )
    for module, said in refused:
        with pytest.raises(DataError, match=said):
            quiet_trainer(tmp_path, max_steps=1).fit(module, datamodule=data)


def test_answers_of_an_earlier_test_do_not_stay(
    language_model_folder, safety_data, tmp_path
) -> None:
    module = SafetyModule(
        Policy(
            str(language_model_folder),
            lora=SMALL,
            generation=Generation(max_new_tokens=2),
        ),
        evaluation=SafetyEvaluation(answer_in=["test", "train"], answers_at_most=1),
    )
    move_adapters(module)
    for _ in range(2):
        quiet_trainer(tmp_path).test(module, safety_data, verbose=False)
        counts = {name: len(found) for name, found in module.answers.items()}
        assert counts == {"test": 2, "train": 2}
    assert [row["index"] for row in read_rows(tmp_path / "answers/train.jsonl")] == [
        0,
        14,
    ]


# Loading -----------------------------------------------------------------------------------------


def test_only_the_adapters_are_trained_and_they_are_float32(
    language_model_folder: Path,
) -> None:
    model = load_language_model(
        Policy(str(language_model_folder), dtype="bfloat16"), Lora(r=4)
    )
    assert isinstance(model, PeftModel)
    for name, weight in model.named_parameters():
        assert weight.requires_grad == ("lora_" in name)
        assert weight.dtype == (torch.float32 if "lora_" in name else torch.bfloat16)
    trained = {
        name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad
    }
    assert trained == {"q_proj", "v_proj"}  # PEFT's default for Llama


def test_dropout_draws_its_numbers_quickly_wherever_the_model_comes_from(
    language_model_folder, tmp_path
) -> None:
    fresh = load_language_model(str(language_model_folder), Lora(lora_dropout=0.5))
    fresh.save_pretrained(tmp_path / "adapter")
    policy = Policy(str(tmp_path / "adapter"), continue_adapter=True)
    for model in (fresh, load_language_model(policy, Lora())):
        layers = [part for part in model.modules() if isinstance(part, nn.Dropout)]
        assert {type(layer) for layer in layers} == {QuickDropout}
        kept = layers[0].train()(torch.ones(1000)) != 0
        assert 400 < kept.sum() < 600
        assert (layers[0].eval()(torch.ones(9)) == 1).all()


def test_without_lora_it_is_the_plain_model(language_model_folder: Path) -> None:
    model = load_language_model(Policy(str(language_model_folder), attention="eager"))
    assert type(model) is LlamaForCausalLM
    assert model.config._attn_implementation == "eager"
    assert model.dtype == torch.float32  # that of the files


def test_gradient_checkpointing_keeps_the_gradient(language_model_folder: Path) -> None:
    grads = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        policy = Policy(
            str(language_model_folder), gradient_checkpointing=checkpointing
        )
        model = load_language_model(policy, Lora(lora_dropout=0.0)).train()
        base = model.get_base_model()  # Renamed in newer versions of transformers.
        flags = ("is_activation_checkpointing", "is_gradient_checkpointing")
        assert any(getattr(base, flag, False) for flag in flags) == checkpointing
        model(input_ids=torch.arange(3, 20)[None]).logits.square().mean().backward()
        grads.append(
            {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        )
    assert grads[0].keys() == grads[1].keys()
    assert max(gradient.abs().max() for gradient in grads[0].values()) > 1e-5
    for name, gradient in grads[0].items():
        torch.testing.assert_close(grads[1][name], gradient)


@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is not None, reason="it is there"
)
def test_four_bits_without_the_package_say_what_to_install(
    language_model_folder: Path,
) -> None:
    with pytest.raises(ImportError, match="bitsandbytes"):
        load_language_model(Policy(str(language_model_folder), quantize_4bit=True))


def test_a_tokenizer_without_an_end_token_or_a_chat_template_is_refused() -> None:
    for missing, name in (
        ("eos_token", "end token"),
        ("chat_template", "chat template"),
    ):
        tokenizer = build_tokenizer()
        setattr(tokenizer, missing, None)
        # one sentence on the command line
        with pytest.raises(DataError, match=f"no {name}"):
            ConversationEncoder(tokenizer)
