"""The learning rates of matrices, against the updates that the optimizer makes."""

import pytest
import torch

from tril.model.gpt import GPT, GPTConfig
from tril.model.training import optim
from tril.model.training.optim import OptimConfig, build_optimizer, effective_rates

SHAPE = {"vocab_size": 40, "context_length": 8, "n_layers": 2, "dim": 32, "n_heads": 4, "n_kv_heads": 2}
CONFIGS = [
    OptimConfig(),
    OptimConfig(lr_scale=0.5, adjust_lr="match_rms_adamw"),
    OptimConfig(kind="adamw", lr=0.01, lr_scale=2.0),
    OptimConfig(scale_with_width=True, base_width=16, base_head_dim=4),
    OptimConfig(kind="adamw", lr=0.01, scale_with_width=True, base_width=16, base_head_dim=4),
]


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_they_are_the_sizes_of_the_first_steps(config, monkeypatch):
    """AdamW's first step moves every element by the rate, Muon's with exact orthogonalization has it as its norm."""

    def exact(matrices, steps):
        left, _, right = torch.linalg.svd(matrices, full_matrices=False)
        return left @ right

    monkeypatch.setattr(optim, "orthogonalize", exact)
    model = GPT(GPTConfig(**SHAPE, head_dim=4, mlp="swiglu", pos="learned", tie_embeddings=False))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape)
    build_optimizer(model, config).step()
    rates = effective_rates(model, config)
    matrices = [name for name, p in model.named_parameters() if p.ndim == 2]
    assert rates.keys() == {name.split(".")[-2] for name in matrices}
    for name in matrices:
        step = model.get_parameter(name).detach() - before[name]
        by_muon = config.kind == "muon" and "blocks." in name
        size = torch.linalg.matrix_norm(step, 2) if by_muon else step.abs().max()
        assert size.item() == pytest.approx(rates[name.split(".")[-2]], rel=1e-3), name
