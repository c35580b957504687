"""Which parameter is updated by which rule, and the settings of both."""

import dataclasses

import pytest
from torch import nn

from tests.model.training.test_optim import net
from tril.model.gpt import GPT, GPTConfig
from tril.model.training.optim import OptimConfig, param_groups
from tril.model.training.schedule import ScheduleConfig


def names_by_group(model: nn.Module, config: OptimConfig) -> dict[str, set[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {group["name"]: {names[id(p)] for p in group["params"]} for group in param_groups(model, config)}


BIASES_AND_NORMS = {"norm.weight", "norm.bias"} | {
    f"blocks.{i}.{name}" for i in (0, 1) for name in ("norm.weight", "norm.bias", "up.bias")
}
BLOCK_MATRICES = {f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("up", "down")}


def test_groups_of_a_gpt():
    model = GPT(
        GPTConfig(
            vocab_size=7,
            context_length=5,
            n_layers=1,
            dim=8,
            n_heads=2,
            mlp="swiglu",
            pos="learned",
            bias=True,
            tie_embeddings=False,
        )
    )
    got = names_by_group(model, OptimConfig())
    matrices = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.o_proj", "mlp.up", "mlp.gate", "mlp.down")
    assert got["muon"] == {f"blocks.0.{name}.weight" for name in matrices}
    assert got["decay"] == {"embed.weight", "pos_embed.weight", "head.weight"}
    assert (
        got["no_decay"]
        == {name for name, p in model.named_parameters() if p.ndim == 1}
        > {f"blocks.0.{m}.bias" for m in matrices}
    )


def test_tied_weights_and_frozen_parameters():
    model = net()
    model.head.weight = model.embed.weight
    model.norm.requires_grad_(False)
    got = names_by_group(model, OptimConfig())
    assert got["decay"] == {"embed.weight"}
    assert got["no_decay"] == BIASES_AND_NORMS - {"norm.weight", "norm.bias"}


def test_nothing_to_train_is_an_error():
    with pytest.raises(ValueError, match="no trainable parameters"):
        param_groups(net().requires_grad_(False), OptimConfig())
    with pytest.raises(ValueError, match=r"blocks\..*optim=adamw"):
        param_groups(nn.Linear(3, 3), OptimConfig())


def test_equal_optimizers_have_one_canonical_form():
    """Muon's keys have no effect on AdamW, those of the base model have one for scaled rates only."""
    changes = {"muon_lr": 0.1, "muon_weight_decay": 0.1, "momentum": 0.1, "nesterov": False, "ns_steps": 1}
    changes["adjust_lr"] = "match_rms_adamw"
    assert tuple(changes) == ("muon_lr", "muon_weight_decay", "momentum", "nesterov", "ns_steps", "adjust_lr")
    for name, value in changes.items():
        assert OptimConfig(kind="adamw", **{name: value}).canonical() == OptimConfig(kind="adamw")
        assert OptimConfig(**{name: value}).canonical() == OptimConfig(**{name: value}) != OptimConfig()
    base = {"base_width": 64, "base_head_dim": 16}
    assert OptimConfig(**base).canonical() == OptimConfig()
    assert len({OptimConfig(scale_with_width=True, **{name: base[name]}).canonical() for name in base}) == 2
    shared = {
        "lr_scale": 0.5,
        "scale_with_width": True,
        "lr": 0.1,
        "betas": (0.1, 0.2),
        "eps": 0.1,
        "weight_decay": 0.1,
        "schedule": ScheduleConfig("cosine"),
    }
    for name, value in shared.items():
        assert getattr(OptimConfig(kind="adamw", **{name: value}).canonical(), name) == value
    assert set(changes) | set(base) | set(shared) | {"kind"} == {
        field.name for field in dataclasses.fields(OptimConfig)
    }
