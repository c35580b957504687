"""Which parameter is updated by which rule, and the settings of both."""

import dataclasses
import math

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from tests.model.training.test_optim import MUON, net, random_params
from tril.data.settings import explain
from tril.model.gpt import GPT, GPTConfig
from tril.model.training import optim
from tril.model.training.optim import MuonAdamW, OptimConfig, check_partition, param_groups
from tril.model.training.schedule import ScheduleConfig


def names_by_group(model: nn.Module, config: OptimConfig) -> dict[str, set[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {group["name"]: {names[id(p)] for p in group["params"]} for group in param_groups(model, config)}


BIASES_AND_NORMS = {"norm.weight", "norm.bias"} | {
    f"blocks.{i}.{name}" for i in (0, 1) for name in ("norm.weight", "norm.bias", "up.bias")
}
BLOCK_MATRICES = {f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("up", "down")}


def test_muon_groups():
    assert names_by_group(net(), OptimConfig()) == {
        "muon": BLOCK_MATRICES,
        "decay": {"embed.weight", "head.weight"},
        "no_decay": BIASES_AND_NORMS,
    }


def test_adamw_groups():
    assert names_by_group(net(), OptimConfig(kind="adamw")) == {
        "decay": BLOCK_MATRICES | {"embed.weight", "head.weight"},
        "no_decay": BIASES_AND_NORMS,
    }


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


def test_groups_carry_the_values_of_the_config():
    config = OptimConfig(
        lr=1.0,
        muon_lr=2.0,
        betas=[0.1, 0.2],
        eps=3.0,
        weight_decay=4.0,
        muon_weight_decay=5.0,
        momentum=0.6,
        nesterov=False,
        ns_steps=7,
        adjust_lr="match_rms_adamw",
    )
    muon, decay, no_decay = ({k: v for k, v in group.items() if k != "params"} for group in param_groups(net(), config))
    assert muon == {
        "name": "muon",
        "kind": "muon",
        "lr": 2.0,
        "weight_decay": 5.0,
        "momentum": 0.6,
        "nesterov": False,
        "ns_steps": 7,
        "adjust_lr": "match_rms_adamw",
    }
    assert decay == {
        "name": "decay",
        "kind": "adamw",
        "lr": 1.0,
        "weight_decay": 4.0,
        "betas": (0.1, 0.2),
        "eps": 3.0,
        "fused": True,
    }
    assert no_decay == decay | {"name": "no_decay", "weight_decay": 0.0}


def test_tied_weights_and_frozen_parameters():
    model = net()
    model.head.weight = model.embed.weight
    model.norm.requires_grad_(False)
    got = names_by_group(model, OptimConfig())
    assert got["decay"] == {"embed.weight"}
    assert got["no_decay"] == BIASES_AND_NORMS - {"norm.weight", "norm.bias"}


def test_a_parameter_outside_or_in_two_groups_is_named():
    named = dict(net().named_parameters())
    groups = param_groups(net(), OptimConfig())
    with pytest.raises(ValueError, match=r"embed\.weight \(in 0\)"):  # the groups of another model hold none of these
        check_partition(named, groups)
    twice = [{"params": list(named.values())}, {"params": [named["head.weight"]]}]
    with pytest.raises(ValueError) as error:
        check_partition(named, twice)
    assert "head.weight (in 2)" in str(error.value) and "embed.weight" not in str(error.value)


def test_param_groups_checks_its_own_partition(monkeypatch):
    def refuse(named, groups):
        raise ValueError(f"{len(named)} parameters in {len(groups)} groups")

    monkeypatch.setattr(optim, "check_partition", refuse)
    with pytest.raises(ValueError, match="14 parameters in 3 groups"):
        param_groups(net(), OptimConfig())


def test_nothing_to_train_is_an_error():
    with pytest.raises(ValueError, match="no trainable parameters"):
        param_groups(net().requires_grad_(False), OptimConfig())
    with pytest.raises(ValueError, match=r"blocks\..*optim=adamw"):
        param_groups(nn.Linear(3, 3), OptimConfig())


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"kind": "sgd"}, "kind='sgd' of a parameter group must be one of muon, adamw"),
        (
            {"kind": "muon", "lr": 0.1, "nesterov": True, "weight_decay": 0.0},
            "lacks adjust_lr, momentum, ns_steps; add them",
        ),
        (
            MUON | {"params": [nn.Parameter(torch.zeros(3))]},
            r"2-D parameters only, not shapes \[\(3,\)\]; put them into a group of kind=adamw",
        ),
    ],
)
def test_wrong_groups_are_refused(group, message):
    with pytest.raises(ValueError, match=message):
        MuonAdamW([{"params": random_params([(2, 2)])} | group])


def test_all_invalid_values_are_listed():
    invalid = {
        "kind": "sgd",
        "lr": 0,
        "muon_lr": "0.02",
        "betas": (0.9, 1.0),
        "eps": math.inf,
        "weight_decay": -1,
        "muon_weight_decay": None,
        "momentum": 1.0,
        "nesterov": "yes",
        "ns_steps": 0,
        "adjust_lr": "none",
        "schedule": "wsd",
    }
    with pytest.raises(ValidationError) as error:
        OptimConfig(**invalid)
    assert explain(error.value).split("; ")[:-1] == [
        "optim.kind=sgd must be 'muon' or 'adamw'",
        "optim.lr=0 must be greater than 0",
        "optim.muon_lr='0.02' must be a valid number",
        "optim.betas.1=1.0 must be less than 1",
        "optim.eps=inf must be a finite number",
        "optim.weight_decay=-1 must be greater than or equal to 0",
        "optim.muon_weight_decay=null must be a valid number",
        "optim.momentum=1.0 must be less than 1",
        "optim.nesterov='yes' must be a valid boolean",
        "optim.ns_steps=0 must be greater than or equal to 1",
        "optim.adjust_lr=none must be 'original' or 'match_rms_adamw'",
    ]
    assert "optim.schedule='wsd'" in explain(error.value)


@pytest.mark.parametrize("betas", [0.9, (0.9,), (-0.1, 0.9), "ab"])
def test_betas_are_two_numbers(betas):
    with pytest.raises(ValidationError) as error:
        OptimConfig(betas=betas)
    assert "optim.betas" in explain(error.value)
    assert OptimConfig(betas=[0.5, 0.6]).betas == (0.5, 0.6)


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
