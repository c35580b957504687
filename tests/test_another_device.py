"""Training and sampling on another device than the CPU, simulated by torch's meta device.

It computes nothing, but tensors of two devices do not mix (except in look-ups), and reading a value, which would wait
for a GPU, fails.
"""

from types import SimpleNamespace

import pytest
import torch

from tests.conftest import tiny_gpt, training_module
from tril.data.batches import IGNORE
from tril.model.generation import generate
from tril.model.generation.config import SamplingConfig
from tril.model.training.optim import OptimConfig

V, T, NEW, EOT = 31, 6, 7, 7  # the new tokens go beyond the context
SHAPE = {"n_layers": 1, "context_length": T}
PARTS = [
    {"n_kv_heads": 2, "window": 4, "qk_norm": "rmsnorm", "mlp": "swiglu", "logit_softcap": 9.0},
    {"pos": "learned", "norm": "layernorm", "bias": True, "mlp": "gelu", "tie_embeddings": True},
    {"pos": "alibi", "backend": "explicit", "attn_dropout": 0.1, "resid_dropout": 0.1, "embd_dropout": 0.1},
    {"backend": "stacked", "pos": "none", "qk_norm": "layernorm"},
    {"n_heads": 0},
]
UNEQUAL = [[1, 2], [3] * 5, [4] * 9]
FILTERS = {"top_k": None, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.3}
SAMPLED = [([[1, 2, 3]], False, {}), (UNEQUAL, False, {"temperature": 0.0}), (UNEQUAL, True, FILTERS)]


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_a_training_step_neither_mixes_devices_nor_reads_a_value(parts):
    for kind, document_eot in (("muon", EOT), ("adamw", None)):
        model = tiny_gpt(**SHAPE, **parts).to("meta")
        module = training_module(model, 40, OptimConfig(kind=kind), document_eot=document_eot).train()
        module._trainer = SimpleNamespace(precision="bf16-mixed", num_val_batches=[1])
        made = module.configure_optimizers()
        optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
        inputs, targets = torch.randint(V, (2, 4, T), device="meta")
        for step in range(2):  # in the second the optimizer has states
            loss = module.training_step((inputs, targets.masked_fill(targets == 3, IGNORE)), step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        module.eval().validation_step((inputs, targets), 0)
        assert loss.device.type == "meta"


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_sampling_neither_mixes_devices_nor_reads_a_value(parts, monkeypatch):
    generator = torch.Generator  # the meta device has no random numbers
    monkeypatch.setattr(torch, "Generator", lambda device: generator())
    monkeypatch.setattr(torch.Tensor, "cpu", lambda ids: torch.zeros(ids.shape, dtype=ids.dtype))  # no values
    monkeypatch.setattr(generate, "compiled_step", lambda device_type: generate.decode_step)
    gate = torch.ones(1, 4, device="meta") if parts.get("n_heads") != 0 else None
    model = tiny_gpt(**SHAPE, **parts).to("meta")
    for prompts, compile, sampling in SAMPLED[PARTS.index(parts) % 2 :]:
        settings = SamplingConfig(max_new_tokens=NEW, **sampling)
        found = generate.generate_ids(model, prompts, settings, eot_id=EOT, head_gate=gate, compile=compile)
        assert [tuple(ids.shape) for ids in found] == [(len(prompts),)] * NEW
