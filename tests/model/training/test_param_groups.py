"""Which parameter is updated by which rule, and the settings of both."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from tests.model.training.test_optim import MUON, net, random_params
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
        GPTConfig(vocab_size=7, context_length=5, n_layers=1, dim=8, n_heads=2, mlp="swiglu", pos="learned", bias=True)
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
        ({"kind": "sgd"}, "'sgd' .legal: muon, adamw"),
        ({"kind": "muon", "lr": 0.1, "nesterov": True, "weight_decay": 0.0}, "lacks adjust_lr, momentum, ns_steps"),
        (MUON | {"params": [nn.Parameter(torch.zeros(3))]}, r"2-D parameters only, got shapes \[\(3,\)\]"),
    ],
)
def test_wrong_groups_are_refused(group, message):
    with pytest.raises(ValueError, match=message):
        MuonAdamW([{"params": random_params([(2, 2)])} | group])


# --- Configuration --------------------------------------------------------------------------------------------------------------


def test_all_wrong_values_are_named_at_once():
    wrong = {
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
        "schedule": {"kind": "wsd"},
    }
    with pytest.raises(ValueError) as error:
        OptimConfig(**wrong)
    message = str(error.value)
    assert all(f"optim.{name}={value!r} (legal: " in message for name, value in wrong.items())
    assert "muon, adamw" in message and "original, match_rms_adamw" in message and "\n" not in message


@pytest.mark.parametrize("betas", [0.9, (0.9,), (-0.1, 0.9), "ab"])
def test_betas_are_two_numbers(betas):
    with pytest.raises(ValueError, match="optim.betas="):
        OptimConfig(betas=betas)


CONFIGS = Path(__file__).parents[3] / "configs" / "optim"


def from_yaml(name: str) -> OptimConfig:
    values = yaml.safe_load((CONFIGS / name).read_text())
    assert set(values) == {field.name for field in dataclasses.fields(OptimConfig)}
    assert set(values["schedule"]) == {field.name for field in dataclasses.fields(ScheduleConfig)}
    return OptimConfig(**values | {"betas": tuple(values["betas"]), "schedule": ScheduleConfig(**values["schedule"])})


def test_yaml_files_mirror_the_dataclasses():
    assert from_yaml("muon.yaml") == OptimConfig()
    adamw = OptimConfig(
        kind="adamw", lr=1e-3, weight_decay=0.1, schedule=ScheduleConfig("cosine", warmup_steps=100, min_lr_ratio=0.1)
    )
    assert from_yaml("adamw.yaml") == adamw
