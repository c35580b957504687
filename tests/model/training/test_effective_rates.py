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


def test_muons_factor_for_the_shape_of_o_proj():
    """From head size 12 to 48 at a constant width, o_proj's rate halves; q_proj's grows above the width."""
    rates = [effective_rates(GPT(GPTConfig(50, head_dim=size)), OptimConfig(muon_lr=0.5)) for size in (12, 48, 192)]
    assert [each["q_proj"] for each in rates] == pytest.approx([0.5, 0.5, 1.0])  # rows / columns: 1/4, 1, 4
    assert [each["o_proj"] for each in rates] == pytest.approx([1.0, 0.5, 0.5])
    assert rates[0]["up"] == 2 * rates[0]["down"] == 1.0 and rates[0]["embed"] == 0.02


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


def test_a_tied_head_is_the_embedding_and_no_values_are_needed():
    with torch.device("meta"):
        model = GPT(GPTConfig(**SHAPE))
    assert list(effective_rates(model, OptimConfig())) == [
        *("embed", "q_proj", "k_proj", "v_proj", "o_proj", "up", "down")
    ]
