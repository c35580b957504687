"""One optimizer for two rules: Muon for the weight matrices inside the blocks, AdamW for everything else.

AdamW scales the step of each weight by the history of its gradient. Muon updates a matrix as a whole: it replaces the
momentum by a nearly orthogonal matrix with the same singular vectors, so that all directions are learned equally fast.

Muon: Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/   AdamW: https://arxiv.org/abs/1711.05101
"""

# pyright: reportPrivateImportUsage=false
# torch._foreach_* are the functions of torch.optim for many tensors at once.

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tril.model.gpt import GPT
from tril.model.training.settings import OptimConfig

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's quintic: steepest slope at 0 that keeps large values near 1
FLOAT32_EXPONENT = 0x7F800000  # its bits
DECAYS = ("weight_decay", "muon_weight_decay")  # the settings
MAX_ROW_FACTOR = 2.0  # without a limit, a run can diverge (docs/log.md)
MAX_DECAY = 4.0  # the largest that was tried (docs/log.md)
MATCH_RMS = 0.2  # root mean square of a typical AdamW update: Liu et al., 2025, https://arxiv.org/abs/2502.16982, 2.2


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Newton-Schulz iteration: moves the singular values of each matrix towards 1 and keeps its singular vectors.

    After 5 steps, singular values above 0.2% of the matrix's Frobenius norm end between 0.68 and 1.21.

    Args:
        matrices: (N, rows, columns), of a float dtype, which the matrix products use too.
        steps: number of iterations.

    Returns:
        (N, rows, columns) of the same dtype.
    """
    a, b, c = NS_COEFFICIENTS
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if tall else matrices  # wide: the Gram matrix has the shorter side
    # Divided by the power of two below the largest number, which is exact, so no square overflows or vanishes.
    power = x.abs().amax(dim=(-2, -1), keepdim=True).float().view(torch.int32).bitwise_and(FLOAT32_EXPONENT)
    x = x / power.view(torch.float32).clamp(min=torch.finfo(torch.float32).tiny).to(x.dtype)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1)  # now all singular values <= 1; 0 of a zero matrix
    for _ in range(steps):
        gram = x @ x.mT  # (N, shorter, shorter)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)  # a x + (b gram + c gram^2) x
    return x.mT if tall else x


def suitable_decay(config: OptimConfig, steps: int, passes: float) -> float:
    """The weight decay, of Muon and its AdamW, that suits a run that makes several passes over its text; else 0.

    At its peak, Muon's learning rate times the decay shrinks the weights by a factor e in each pass, since the best
    decay keeps this time constant for texts of any size (Wang and Aitchison 2024, https://arxiv.org/abs/2405.13698).
    """
    return 0.0 if passes <= 1 else min(round(passes / (steps * config.lr_scale * config.muon_lr), 2), MAX_DECAY)


class MuonAdamW(torch.optim.Optimizer):
    """Updates parameter groups of kind="muon" (2-D parameters only) and kind="adamw", each by its rule, in one `step`.

    Muon follows torch.optim.Muon, which computes in bf16 in every run, one matrix at a time; here, all matrices of one
    shape are orthogonalized in one batch. AdamW is torch's fused kernel.

    Args:
        groups: as `param_groups` makes them; there are no defaults.
        products: the dtype of Muon's matrix products. A checkpoint does not hold it.
    """

    def __init__(self, groups: Iterable[dict], products: torch.dtype = torch.float32) -> None:
        super().__init__(groups, defaults={})
        self.products = products

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state of each parameter. Torch's kernels write beyond a tensor of another shape or dtype.

        Raises:
            ValueError: a state does not fit its parameter.
        """
        super().load_state_dict(state_dict)
        for p, state in self.state.items():
            for name, value in state.items():
                shape, dtype = (torch.Size(), torch.float32) if name == "step" else (p.shape, p.dtype)
                if not isinstance(value, Tensor) or (value.shape, value.dtype) != (shape, dtype):
                    raise ValueError(f"{name} of the optimizer must have the shape {tuple(shape)} in {dtype}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Updates every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():  # Lightning runs forward and backward inside the closure
                loss = closure()
        for group in self.param_groups:
            by_shape: dict[torch.Size | None, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape if group["kind"] == "muon" else None].append(p)
            for params in by_shape.values():
                update = self._muon if group["kind"] == "muon" else self._adamw
                update(params, [p.grad for p in params if p.grad is not None], group)
        return loss

    def _muon(self, params: list[Tensor], grads: list[Tensor], group: dict) -> None:
        """One Muon step for parameters of one shape.

        adjust_lr="original" (Jordan) raises the learning rate of tall matrices; "match_rms_adamw" (Liu et al.) gives
        updates of AdamW's size, so that AdamW's learning rate and weight decay suit Muon too. `normalize_rows` brings
        the rows of an update to equal norms, which those of a nearly orthogonal matrix do not have (Muon+: Zhang et
        al., 2026, https://arxiv.org/abs/2602.21545). It grows no row by more than MAX_ROW_FACTOR: the row of a unit
        without a gradient is almost zero, and would get an update of full size.
        """
        rate, (rows, columns) = group["lr"], params[0].shape
        ratio = math.sqrt(max(1, rows / columns))
        if group["adjust_lr"] == "match_rms_adamw":
            ratio = MATCH_RMS * math.sqrt(max(rows, columns))
        for p in params:
            if not self.state[p]:
                self.state[p] = {"momentum_buffer": torch.zeros_like(p)}
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        # In torch 2.14, wrong on MPS for bf16 and float16: there the weights of a run are float32 by default.
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        updates = torch._foreach_lerp(grads, buffers, group["momentum"]) if group["nesterov"] else buffers
        directions = orthogonalize(torch.stack(updates).to(self.products), group["ns_steps"])
        # Contiguous for the fast foreach kernel.
        directions = directions.to(params[0].dtype, memory_format=torch.contiguous_format)
        if group["normalize_rows"]:
            norms = directions.norm(dim=-1, keepdim=True)  # (N, rows, 1)
            factors = norms.square().mean(-2, keepdim=True).sqrt() / norms.clamp(min=torch.finfo(norms.dtype).tiny)
            directions *= factors.clamp(max=MAX_ROW_FACTOR)  # a zero row stays zero
        directions *= rate * ratio
        torch._foreach_mul_(params, 1 - rate * group["weight_decay"])
        torch._foreach_sub_(params, directions.unbind())

    def _adamw(self, params: list[Tensor], grads: list[Tensor], group: dict) -> None:
        for p in params:
            if not self.state[p]:  # the fused kernel reads the step on the device
                step = torch.zeros((), dtype=torch.float32, device=p.device)
                self.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        averages, squares, steps = ([self.state[p][k] for p in params] for k in ("exp_avg", "exp_avg_sq", "step"))
        beta1, beta2 = group["betas"]
        options = {key: group[key] for key in ("lr", "weight_decay", "eps", "fused")}
        options |= {"beta1": beta1, "beta2": beta2, "amsgrad": False, "maximize": False}
        adamw(params, grads, averages, squares, [], steps, **options)  # [] is for amsgrad


def param_groups(model: GPT, config: OptimConfig) -> list[dict]:
    """The groups for MuonAdamW: "muon" (matrices in `blocks.`), "decay" (other matrices), "no_decay" (norms, biases).

    Frozen parameters are left out; a tied weight counts once.
    """
    muon = {key: getattr(config, key) for key in ("momentum", "nesterov", "ns_steps", "adjust_lr", "normalize_rows")}
    muon |= {"kind": "muon", "lr": config.lr_scale * config.muon_lr, "weight_decay": config.muon_weight_decay}
    adam = {"kind": "adamw", "lr": config.lr_scale * config.lr, "betas": config.betas, "eps": config.eps, "fused": True}
    no_decay, decay = adam | {"weight_decay": 0.0}, adam | {"weight_decay": config.weight_decay}
    options = {"muon": muon, "decay": decay, "no_decay": no_decay}
    groups = {name: {"name": name, "params": []} | each for name, each in options.items()}
    for name, p in model.named_parameters():  # lists a tied weight once
        if not p.requires_grad:
            continue
        by_muon = config.kind == "muon" and "blocks." in name and p.ndim == 2
        chosen = "muon" if by_muon else "decay" if p.ndim >= 2 else "no_decay"
        groups[chosen]["params"].append(p)
    return [group for group in groups.values() if group["params"]]


def build_optimizer(model: GPT, config: OptimConfig, precision: str = "32-true") -> MuonAdamW:
    """The optimizer of a model in a run of this precision; LambdaLR applies `lr_factor` to it.

    Muon multiplies matrices in bf16 in a run with bf16, on every processor, and in float32 in any other: float16 has
    no room for small gradients, of 1e-8 nothing is left.
    """
    products = torch.bfloat16 if precision.startswith("bf16") else torch.float32
    return MuonAdamW(param_groups(model, config), products)
