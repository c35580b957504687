"""Divides a GPT over the processes of a run: tensor parallelism over some of them, FSDP2 over the others.

Tensor parallelism (Shoeybi et al. 2019): a rank has H / t query heads and G / t key/value heads, 1 / t of the FFN's
hidden units and 1 / t of the vocabulary. The q, k, v, up and gate matrices are divided by rows, o_proj and down by
columns; each of these pairs ends with one sum over the ranks. Norms and the position table are whole on every rank.

FSDP2 (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) divides each parameter by rows over the
data ranks, and gathers the parameters of one block at a time.

t tensor ranks, H query heads, G key/value heads.
"""

import logging
import warnings

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tril.model.attention import MultiHeadAttention
from tril.model.gpt import GPT, Block
from tril.model.initialization import init_parameter
from tril.model.stored_model import SkipInit
from tril.model.training.local_shards import local, part_of

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)  # whole tensors, on rank 0 only


class Replicated(ParallelStyle):
    """Every rank computes the whole module, with parameters that are DTensors as all others are."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
            return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

        def leave(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
            return output.to_local()

        return distribute_module(module, device_mesh, None, enter, leave)  # pyright: ignore[reportArgumentType]


def shard(model: GPT, mesh: DeviceMesh, device: torch.device) -> None:
    """Divides a GPT on the meta device, then gives it the initial weights of a whole one, to the bit.

    Args:
        model: changed in place.
        mesh: with the dimensions "data_parallel" and "tensor_parallel".
        device: of this rank.
    """
    # About DTensors that are divided twice, and about an output that nothing changes in place.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*returned a view tensor")
    data, tensor = mesh["data_parallel"], mesh["tensor_parallel"]
    if tensor.size() > 1:
        split_matrices(model, tensor)
    if data.size() > 1:
        for block in model.blocks:
            fully_shard(block, mesh=data)
        fully_shard(model, mesh=data)
        register_fsdp_forward_method(model, "nll")
    materialize(model, device)
    with device:
        model.make_tables()
    if model.config.pos == "alibi" and model.config.n_heads:
        model.alibi_slopes = model.alibi_slopes.chunk(tensor.size())[tensor.get_local_rank()]


def split_matrices(model: GPT, mesh: DeviceMesh) -> None:
    """Tensor parallelism over the ranks of the mesh."""
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "norm": Replicated(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    if model.pos_embed is not None:
        plan["pos_embed"] = Replicated()
    parallelize_module(model, mesh, plan)
    if model.config.tie_embeddings:
        model.head.weight = model.embed.weight
    for block in model.blocks:
        assert isinstance(block, Block)
        split_block(block, mesh)


def split_block(block: Block, mesh: DeviceMesh) -> None:
    plan: dict[str, ParallelStyle] = {}
    if isinstance(attn := block.attn, MultiHeadAttention):
        attn.n_heads, attn.n_kv_heads = attn.n_heads // mesh.size(), attn.n_kv_heads // mesh.size()
        plan |= {"norm1": Replicated(), "attn.o_proj": RowwiseParallel()}
        plan |= {f"attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        if not isinstance(attn.q_norm, nn.Identity):  # its gain is shared by the heads, whose dimension is 1
            plan |= {f"attn.{name}_norm": SequenceParallel(sequence_dim=1, use_local_output=True) for name in "qk"}
    if block.mlp is not None:
        plan |= {"norm2": Replicated(), "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
        if block.mlp.gate is not None:
            plan["mlp.gate"] = ColwiseParallel()
    parallelize_module(block, mesh, plan)


@torch.no_grad()
def materialize(model: GPT, device: torch.device) -> None:
    """Draws the initial weights. Each parameter has a random stream of its own, so only one whole one is in memory."""
    model.to_empty(device=device)
    for name, p in model.named_parameters():
        whole = torch.empty(p.shape, dtype=p.dtype)
        init_parameter(whole, name, model.config, model.init_seed)
        local(p).copy_(part_of(whole.to(device), p))


def whole_copy(model: GPT) -> GPT | None:
    """The whole model on rank 0's CPU, in evaluation mode; None on other ranks. All ranks must call it."""
    weights = get_model_state_dict(model, options=FULL)
    if not weights:
        return None
    with SkipInit():
        whole = GPT(model.config)
    whole.load_state_dict(weights)
    return whole.eval()


def place_gradients(model: nn.Module) -> None:
    """Divides gradients as their parameters are; sums those to which each tensor rank contributes.

    Such as that of a gain which all heads share. The optimizer needs the same layout, since it reads local parts.
    """
    for p in model.parameters():
        if isinstance(p.grad, DTensor) and p.grad.placements != p.placements:  # pyright: ignore[reportAttributeAccessIssue] DTensor
            p.grad = p.grad.redistribute(placements=p.placements)  # pyright: ignore[reportAttributeAccessIssue] DTensor
