"""Where adapters go, and which of PEFT's options they take."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import peft
import pytest
import torch
from packaging.version import Version
from transformers import AutoModelForCausalLM, Gemma3Config

from pl_pointwise.tasks.language_model.likelihood.scoring import (
    ResponseScorer,
    inference,
)
from pl_pointwise.tasks.language_model.model import adapters
from pl_pointwise.tasks.language_model.model.adapters import (
    Lora,
    add_lora,
    merged_model,
)
from tests.tasks.conftest import build_model, move_adapters, random_batch

EXPERTS: dict[str, Any] = {
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
IDS = torch.arange(3, 43)[None]
HYBRID: dict[str, Any] = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}
HYBRID |= {
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "head_dim": 8,
    "num_hidden_layers": 2,
}

# Where they go ------------------------------------------------------------------------------------

FOUR = {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize(
    ("kind", "options", "names"),
    [
        ("phi3", {}, {"qkv_proj", "o_proj"}),
        ("olmo2", {}, FOUR),
        ("gpt_oss", EXPERTS, FOUR),
        ("lfm2", {}, FOUR - {"o_proj"} | {"out_proj"}),
    ],
)
def test_model_types_that_peft_does_not_know_train_their_attention(
    kind, options, names
) -> None:
    model = add_lora(build_model(kind, **options), Lora(r=2, lora_dropout=0.0)).train()
    found = model.base_model.targeted_module_names
    assert {path.rpartition(".")[2] for path in found} == names
    assert all("attn" in path for path in found)
    scorer, batch = ResponseScorer(model), random_batch((5, 9), ((4, 6), (2, 8)))
    move_adapters(model)
    outputs = scorer(batch)
    (outputs.kl - outputs.mean_log_likelihood).sum().backward()
    assert all(
        p.grad is not None and p.grad.any()
        for p in model.parameters()
        if p.requires_grad
    )
    assert outputs.kl.sum() > 1e-4
    merged = merged_model(model)
    with torch.no_grad():
        expected = model.eval()(IDS).logits
        torch.testing.assert_close(
            merged.eval()(IDS).logits, expected, atol=1e-4, rtol=0
        )


def test_attention_by_name_is_all_of_it() -> None:
    model = add_lora(build_model("llama"), Lora(target_modules="attention"))
    assert {
        n.rpartition(".")[2] for n in model.base_model.targeted_module_names
    } == FOUR
    assert len(model.base_model.targeted_module_names) == 3 * len(FOUR)


def test_a_model_without_attention_asks_for_targets() -> None:
    for target in (None, "attention"):
        with pytest.raises(ValueError, match=r'Set target_modules.*"mamba".*in_proj'):
            add_lora(build_model("mamba", state_size=4), Lora(target_modules=target))


def test_attention_outside_the_decoder_takes_no_adapter() -> None:
    """A vision tower of names like the decoder's was adapted, and had no gradient from a text."""
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2}
    text = small | {"vocab_size": 40, "num_key_value_heads": 2, "head_dim": 8}
    vision = small | {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    adapted = add_lora(
        AutoModelForCausalLM.from_config(config), Lora(target_modules="attention")
    )
    taken = adapted.base_model.targeted_module_names
    assert len(taken) == 4
    assert not [path for path in taken if "vision" in path]


def test_a_target_that_is_lost_among_others_is_named() -> None:
    """PEFT would adapt o_proj alone, a fourth of what was asked for, and say nothing."""
    with pytest.raises(
        ValueError, match=r"no \['q_proj', 'v_proj'\].*\"phi3\".*qkv_proj"
    ):
        add_lora(
            build_model("phi3"), Lora(target_modules=["q_proj", "v_proj", "o_proj"])
        )
    with pytest.raises(ValueError, match=r"no \['embeddings'\].*\"llama\""):
        add_lora(build_model("llama"), Lora(modules_to_save=["embeddings"]))


@pytest.mark.parametrize(
    ("kind", "options", "left", "taken"),
    [
        ("llama4_text", EXPERTS | {"intermediate_size_mlp": 16}, "router", "down_proj"),
        ("phimoe", EXPERTS, "router", "o_proj"),
        ("falcon", {}, "lm_head", "dense_h_to_4h"),  # Its own linear layer is one.
    ],
)
def test_a_linear_layer_that_returns_no_tensor_takes_no_adapter(
    kind, options, left, taken
) -> None:
    model = build_model(kind, **options)
    if left == "router":
        with pytest.raises(
            ValueError, match=r"router'\] are routers.* to peft.exclude_modules"
        ):
            add_lora(deepcopy(model), Lora(target_modules=["router"]))
    adapted = add_lora(model, Lora(r=2, target_modules="all-linear"))
    adapted(IDS)
    ends = {
        path.rpartition(".")[2] for path in adapted.base_model.targeted_module_names
    }
    assert taken in ends
    assert left not in ends


def test_what_peft_refuses_in_a_hybrid_is_left_out_of_every_linear_layer() -> None:
    """Falcon-H1: the user never wrote out_proj, which PEFT's error asked to take out."""
    model = build_model("falcon_h1", **HYBRID)
    adapted = add_lora(model, Lora(r=2, target_modules="all-linear"))
    ends = {
        path.rpartition(".")[2] for path in adapted.base_model.targeted_module_names
    }
    assert {"in_proj", "q_proj", "down_proj"} <= ends
    assert not ends & {"out_proj", "conv1d", "lm_head"}
    adapted(IDS)
    with pytest.raises(ValueError, match=r"out_proj.* incompatible"):
        add_lora(
            build_model("falcon_h1", **HYBRID), Lora(r=2, target_modules=["out_proj"])
        )


JAMBA: dict[str, Any] = {"num_experts": 2, "mamba_d_state": 4, "mamba_dt_rank": 4}
JAMBA |= {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}


@pytest.mark.parametrize(
    ("kind", "options", "idle"),
    [
        ("mamba", {"state_size": 4}, {"x_proj", "dt_proj", "out_proj"}),
        ("jamba", JAMBA, {"dt_proj"}),
        # It takes slices of its weights where an old switch says so.
        ("bloom", {}, set()),
    ],
)
def test_a_layer_whose_weight_is_read_by_another_takes_no_adapter(
    kind, options, idle
) -> None:
    """Adapters of Mamba's dt_proj had no gradient, and the merged model was another: by 4 of 5."""
    adapted = add_lora(
        build_model(kind, **options), Lora(r=2, target_modules="all-linear")
    )
    ends = {
        path.rpartition(".")[2] for path in adapted.base_model.targeted_module_names
    }
    assert not ends & idle
    move_adapters(adapted)
    adapted(IDS, use_cache=False).logits.logsumexp(-1).sum().backward()
    assert all(p.grad.any() for p in adapted.parameters() if p.requires_grad)
    with torch.no_grad():
        expected = adapted.eval()(IDS, use_cache=False).logits
        found = merged_model(adapted).eval()(IDS, use_cache=False).logits
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)  # of logits up to 4
    if idle:
        with pytest.raises(ValueError, match=r"dt_proj.* reads these weights itself"):
            add_lora(
                build_model(kind, **options), Lora(r=2, target_modules=["dt_proj"])
            )


def test_a_hybrid_with_adapters_in_few_layers_says_so(monkeypatch) -> None:
    said = list[str]()
    monkeypatch.setattr(adapters, "rank_zero_info", said.append)
    for target in ("attention", "all-linear"):
        add_lora(build_model("lfm2"), Lora(r=2, target_modules=target))
    add_lora(build_model("llama"), Lora(r=2, layers_to_transform=[1]))
    (one,) = said
    assert one.startswith(
        "lora: adapters are in 1 of 3 layers. target_modules: all-linear"
    )


# PEFT's options -----------------------------------------------------------------------------------


def test_layers_ranks_and_scales_are_chosen() -> None:
    lora = Lora(
        target_modules=["q_proj", "v_proj"],
        layers_to_transform=[0, 2],
        peft={
            "exclude_modules": ["v_proj"],
            "rank_pattern": {"q_proj": 3},
            "alpha_pattern": {"q_proj": 6},
            "lora_bias": True,
        },
    )
    with pytest.raises(
        ValueError, match=r"no \['v_proj'\].*that the other options leave"
    ):
        add_lora(build_model("llama"), lora)
    lora.target_modules = "attention"
    model = add_lora(build_model("llama"), lora)
    layers = {name.split(".")[2] for name in model.base_model.targeted_module_names}
    assert layers == {"0", "2"}
    adapted = model.get_base_model().model.layers[0].self_attn.q_proj
    assert adapted.lora_A["default"].out_features == 3
    assert adapted.scaling["default"] == 2
    assert adapted.lora_B["default"].bias is not None
    assert not hasattr(
        model.get_base_model().model.layers[0].self_attn.v_proj, "lora_A"
    )
    with pytest.raises(ValueError, match="Set target_modules"):
        add_lora(
            build_model("llama"),
            Lora(target_modules="attention", layers_to_transform=[9]),
        )


def test_experts_are_adapted_by_their_parameters_and_merged() -> None:
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = Lora(
        r=2, lora_dropout=0.0, target_modules=["q_proj"], target_parameters=parameters
    )
    base = build_model("qwen3_moe", **EXPERTS)
    with torch.no_grad():
        start = base.eval()(IDS).logits
    model = add_lora(base, lora)
    move_adapters(model)
    with torch.no_grad():
        expected = model.eval()(IDS).logits
        with inference(model, reference=True):
            torch.testing.assert_close(model(IDS).logits, start)
        merged = build_model("qwen3_moe", **EXPERTS).eval()
        merged.load_state_dict(merged_model(model).state_dict())
        assert (expected - start).abs().max() > 0.1
        torch.testing.assert_close(merged(IDS).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        # What changes the base's weights:
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"bias": "all"}, "bias"),
        # What PEFT does not know:
        ({"use_dorra": True}, "lora.peft='use_dorra': choose one of .*use_dora"),
        ({"r": 4}, "lora.peft='r': choose one of"),
        ({"inference_mode": True}, "lora.peft='inference_mode': choose one of"),
    ],
)
def test_options_that_cannot_be_are_named(options, said) -> None:
    with pytest.raises(ValueError, match=said):
        Lora(peft=options)


@pytest.mark.skipif(
    Version(peft.__version__) < Version("0.19"),
    reason="PEFT 0.18 leaves such adapters untied",
)
def test_adapters_that_are_tied_until_they_move_are_refused() -> None:
    lora = Lora(target_modules=["embed_tokens"], peft={"ensure_weight_tying": True})
    with pytest.raises(
        ValueError, match=r"ensure_weight_tying: adapters .* in modules_to_save"
    ):
        add_lora(build_model("llama", tie_word_embeddings=True), lora)
