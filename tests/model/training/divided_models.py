"""Compares divided GPTs with whole ones, as one rank of `tests.ranks.run_ranks`. Rank 0 writes the differences.

Arguments: the number of tensor ranks, and the file for the results.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tril.model.gpt import GPT, GPTConfig
from tril.model.training.optim import OptimConfig, build_optimizer
from tril.model.training.parallel import place_gradients, shard, whole_copy

B, T, V = 8, 12, 31  # windows of all ranks, context length, an odd vocabulary
SHAPE = {"vocab_size": V, "context_length": T, "n_layers": 2, "dim": 32, "n_heads": 4, "init": "gpt2"}
CASES = {
    "default": {},
    "llama": {"n_kv_heads": 2, "mlp": "swiglu", "mlp_hidden": 64, "norm_eps": 1e-5, "qk_norm": "none"},
    "gpt2": {"pos": "learned", "bias": True, "norm": "layernorm", "mlp": "gelu", "qk_norm": "layernorm"},
    "untied": {"tie_embeddings": False, "logit_softcap": 5.0, "pos": "alibi", "head_dim": 10, "window": 5},
    "checkpointed": {"checkpoint_activations": True},
    "no attention": {"n_heads": 0},
    "no FFN": {"mlp": "none"},
}


def compare(config: GPTConfig, mesh: DeviceMesh) -> dict[str, float]:
    """Largest differences from a whole model: initial values, loss, gradients, and weights after three steps."""
    torch.manual_seed(0)
    whole = GPT(config)
    torch.manual_seed(0)
    with torch.device("meta"):
        divided = GPT(config)
    shard(divided, mesh, torch.device("cpu"))
    found = {"initial": largest(divided, whole)}
    data = mesh["data_parallel"]
    rows = slice(data.get_local_rank(), None, data.size())
    optimizers = [build_optimizer(model, OptimConfig(lr_scale=0.1)) for model in (whole, divided)]
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        ids, targets = torch.randint(V, (2, B, T), generator=generator)
        expected, actual = whole.nll(ids, targets), divided.nll(ids[rows], targets[rows])
        found[f"loss {step}"] = difference(actual, expected[rows])
        expected.mean().backward()
        actual.mean().backward()
        place_gradients(divided)
        found[f"gradient {step}"] = largest(divided, whole, gradients=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found["weights"] = largest(divided, whole, scale=1.0)
    copy = whole_copy(divided)
    if copy is not None:
        found["copy"] = difference(copy(ids), whole.eval()(ids))
    held = sum(p.to_local().numel() for p in divided.parameters() if isinstance(p, DTensor))
    return found | {"share": held / whole.n_parameters()}


def largest(divided: GPT, whole: GPT, *, gradients: bool = False, scale: float = 1e-3) -> float:
    """The largest difference of parameters, or of gradients, relative to the largest element of each, or to `scale`."""
    pairs = zip(divided.parameters(), whole.parameters(), strict=True)
    return max(difference(*((p.grad, q.grad) if gradients else (p, q)), scale) for p, q in pairs)


@torch.no_grad()
def difference(actual: Tensor, expected: Tensor, scale: float = 1e-3) -> float:
    actual = actual.full_tensor() if isinstance(actual, DTensor) else actual
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=scale)).item()


def main() -> None:
    tensor_ranks, path = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    shape = (dist.get_world_size() // tensor_ranks, tensor_ranks)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data_parallel", "tensor_parallel"))
    found = {name: compare(GPTConfig(**SHAPE | choices), mesh) for name, choices in CASES.items()}
    if dist.get_rank() == 0:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(found, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
