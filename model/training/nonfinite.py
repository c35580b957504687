"""Where the first number arises that is not finite: NaN or infinite."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from tril.model.training.local_shards import local
from tril.model.training.module import Batch, TrainingModule


def first_nonfinite_output(module: TrainingModule, batch: Batch, precision: AbstractContextManager) -> str | None:
    """Runs the forward pass again and names the first module, in the order of execution, with a non-finite output.

    The pass is not compiled, draws no random numbers from the run's generators and keeps nothing for a backward pass.

    Args:
        batch: inputs and targets.
        precision: the context of a training step's forward pass, such as autocast.

    Returns:
        The module's name, such as "blocks.0.attn.q_proj"; "the loss" if it alone is not finite; None if all are finite.
    """
    found: list[str] = []

    def check(name: str):
        def hook(_: nn.Module, inputs: object, output: object) -> None:
            if not found and isinstance(output, Tensor) and not is_finite(output):
                found.append(name)

        return hook

    handles = [part.register_forward_hook(check(name)) for name, part in module.model.named_modules() if name]
    devices = [module.device] if module.device.type == "cuda" else []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"), precision:
            nll = module.losses(batch)
    finally:
        for handle in handles:
            handle.remove()
    if not found and not is_finite(nll):
        found.append("the loss")
    return found[0] if found else None


def first_nonfinite_gradient(model: nn.Module, norms: Mapping[str, float]) -> str | None:
    """The name of the first parameter with a non-finite gradient norm, in the order in which gradients are computed.

    This is the reverse of the order of the parameters.

    Args:
        norms: by the parameter's name.
    """
    names = [name for name, _ in model.named_parameters() if name in norms]
    return next((name for name in reversed(names) if not math.isfinite(norms[name])), None)


def is_finite(tensor: Tensor) -> bool:
    """Whether all elements are finite; of a DTensor, those of this rank."""
    return bool(local(tensor).isfinite().all())


def rates_text(groups: Sequence[Mapping]) -> str:
    """The learning rates of an optimizer's groups, in words."""
    rates = {group["name"]: f"{group['lr']:.4g}" for group in groups}
    if len(set(rates.values())) == 1:
        return f"learning rate {next(iter(rates.values()))}"
    return f"learning rates {', '.join(f'{name} {rate}' for name, rate in rates.items())}"
