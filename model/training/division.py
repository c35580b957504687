"""Which models can be divided over the processes of trainer.strategy=model_parallel."""

from tril.model.config import GPTConfig


def check_division(model: GPTConfig, world_size: int, tensor_ranks: int, compile: str | None) -> None:
    """Raises ValueError if the model or the settings cannot be divided.

    Args:
        world_size: processes of the run.
        tensor_ranks: processes that share one batch.
        compile: torch.compile's mode.
    """
    if world_size % tensor_ranks:
        sizes = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        limit = f"must divide {world_size}, the devices of the run; use {sizes}"
        raise ValueError(f"trainer.tensor_parallel_size={tensor_ranks} {limit}")
    parts = {"model.n_heads": model.n_heads, "model.n_kv_heads": model.kv_heads, "model.mlp_hidden": model.mlp_size}
    for name, count in parts.items():
        if count % tensor_ranks:
            must = f"must divide {name}={count}; change one of them"
            raise ValueError(f"trainer.tensor_parallel_size={tensor_ranks} {must}")
    if tensor_ranks > 1 and model.attn_dropout > 0:  # their random numbers are equal, as the residual stream needs
        dropped = f"model.attn_dropout={model.attn_dropout} would drop the same weights in the heads of each rank"
        raise ValueError(f"{dropped}; set it to 0, or trainer.tensor_parallel_size to 1")
    if compile is not None:
        raise ValueError("trainer.strategy=model_parallel does not compile; set compile=false")
