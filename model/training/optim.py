"""One optimizer for two rules: Muon for the weight matrices inside the blocks, AdamW for everything else.

AdamW scales every single weight's step by its own gradient history. Muon treats a matrix as a whole: it replaces the momentum by a
nearly orthogonal matrix with the same singular vectors, so that every direction is learned at the same speed.
Muon: Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/   AdamW: https://arxiv.org/abs/1711.05101
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from tril.model.training.hardware import has_bf16
from tril.model.training.schedule import ScheduleConfig, is_number, is_whole, require_legal

KINDS = ("muon", "adamw")
LR_ADJUSTMENTS = ("original", "match_rms_adamw")

NS_COEFFICIENTS = (
    3.4445,
    -4.7750,
    2.0315,
)  # Jordan's quintic: as steep at 0 as it can be while large values stay near 1
NS_EPS = 1e-7  # Jordan's; a matrix of zeros stays zero
MATCH_RMS = 0.2  # the root mean square of a typical AdamW update: Liu et al., 2025, https://arxiv.org/abs/2502.16982, section 2.2

GROUP_KEYS = {  # what a parameter group has to say, besides its parameters
    "muon": {"lr", "weight_decay", "momentum", "nesterov", "ns_steps", "adjust_lr"},
    "adamw": {"lr", "weight_decay", "betas", "eps", "fused"},
}


@dataclass(frozen=True)
class OptimConfig:
    """How the weights are updated. Rates are peaks; the schedule scales all of them alike.

    kind: "muon" (block matrices by Muon, the rest by AdamW) or "adamw" (everything by AdamW).
    lr, betas, eps, weight_decay: AdamW's; the decay is for matrices only, never for norms and biases.
    muon_lr, muon_weight_decay, momentum, nesterov: Muon's.
    ns_steps: Newton-Schulz iterations; 5 is usual, fewer are cheaper and less orthogonal.
    adjust_lr: how Muon's rate follows a matrix's shape, see `lr_ratio`.

    Raises ValueError naming every illegal value at once.
    """

    kind: str = "muon"
    lr: float = 0.02
    muon_lr: float = 0.014
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    muon_weight_decay: float = 0.0
    momentum: float = 0.9
    nesterov: bool = True
    ns_steps: int = 5
    adjust_lr: str = "original"
    schedule: ScheduleConfig = ScheduleConfig()

    def __post_init__(self) -> None:
        is_pair = isinstance(self.betas, tuple | list) and len(self.betas) == 2
        require_legal(
            self,
            "optim",
            {
                "kind": (self.kind in KINDS, ", ".join(KINDS)),
                "lr": (is_number(self.lr) and self.lr > 0, "above 0"),
                "muon_lr": (is_number(self.muon_lr) and self.muon_lr > 0, "above 0"),
                "betas": (
                    is_pair and all(is_number(b) and 0 <= b < 1 for b in self.betas),
                    "two numbers from 0 to below 1",
                ),
                "eps": (is_number(self.eps) and self.eps > 0, "above 0"),
                "weight_decay": (is_number(self.weight_decay) and self.weight_decay >= 0, "0 or above"),
                "muon_weight_decay": (is_number(self.muon_weight_decay) and self.muon_weight_decay >= 0, "0 or above"),
                "momentum": (is_number(self.momentum) and 0 <= self.momentum < 1, "0 to below 1"),
                "nesterov": (isinstance(self.nesterov, bool), "true, false"),
                "ns_steps": (is_whole(self.ns_steps) and self.ns_steps >= 1, "a whole number >= 1"),
                "adjust_lr": (self.adjust_lr in LR_ADJUSTMENTS, ", ".join(LR_ADJUSTMENTS)),
                "schedule": (isinstance(self.schedule, ScheduleConfig), "a ScheduleConfig"),
            },
        )


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Newton-Schulz iteration: moves the singular values of each matrix towards 1 and leaves its singular vectors alone.

    matrices: (N, rows, columns), any float dtype, which the products use too. Returns the same shape and dtype.
    After 5 steps, singular values that began above 0.2 % of the matrix's Frobenius norm lie between 0.68 and 1.21.
    """
    a, b, c = NS_COEFFICIENTS
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if tall else matrices  # wide, so that the Gram matrix below is the smaller one
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=NS_EPS)  # Frobenius >= spectral norm: all singular values <= 1
    for _ in range(steps):
        gram = x @ x.mT  # (N, shorter, shorter)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)  # a x + (b gram + c gram^2) x
    return x.mT if tall else x


def lr_ratio(adjust_lr: str, rows: int, columns: int) -> float:
    """Muon's rate for a (rows, columns) matrix, relative to the group's.

    "original" (Jordan) gives tall matrices more; "match_rms_adamw" (Liu et al.) gives updates of AdamW's size, so that AdamW's
    learning rate and weight decay fit Muon too.
    """
    return (
        MATCH_RMS * math.sqrt(max(rows, columns))
        if adjust_lr == "match_rms_adamw"
        else math.sqrt(max(1, rows / columns))
    )


class MuonAdamW(torch.optim.Optimizer):
    """Parameter groups tagged kind="muon" (2-D parameters only) or kind="adamw", each updated by its rule in one `step`.

    Muon follows torch.optim.Muon, but orthogonalises all matrices of one shape in one batch; AdamW is torch's own fused kernel.
    A group names all of GROUP_KEYS[kind]; there are no defaults here. Raises ValueError for a group that does not.
    """

    def __init__(self, groups: Iterable[dict]) -> None:
        super().__init__(groups, defaults={})

    def add_param_group(self, group: dict) -> None:
        if group.get("kind") not in GROUP_KEYS:
            raise ValueError(f"parameter group of kind {group.get('kind')!r} (legal: {', '.join(GROUP_KEYS)})")
        if missing := GROUP_KEYS[group["kind"]] - group.keys():
            raise ValueError(f"parameter group of kind {group['kind']!r} lacks {', '.join(sorted(missing))}")
        super().add_param_group(group)
        if group["kind"] == "muon" and any(p.ndim != 2 for p in group["params"]):
            raise ValueError(
                f"Muon takes 2-D parameters only, got shapes {[tuple(p.shape) for p in group['params'] if p.ndim != 2]}"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Updates every parameter that has a gradient. Returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():  # Lightning runs forward and backward inside the closure
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if group["kind"] == "adamw":
                self._adamw(params, group)
            else:
                for same in _by_shape(params):
                    self._muon(same, group)
        return loss

    def _muon(self, params: list[Tensor], group: dict) -> None:
        """One Muon step for parameters of one shape."""
        grads = [p.grad for p in params]
        buffers = [self._buffer(p, "momentum_buffer") for p in params]
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        updates = torch._foreach_lerp(grads, buffers, group["momentum"]) if group["nesterov"] else buffers
        dtype = torch.bfloat16 if has_bf16(params[0].device.type) else torch.float32
        directions = orthogonalize(torch.stack(updates).to(dtype), group["ns_steps"])
        directions = directions.to(
            params[0].dtype, memory_format=torch.contiguous_format
        )  # what the foreach kernel wants
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(
            params, directions.unbind(), alpha=-group["lr"] * lr_ratio(group["adjust_lr"], *params[0].shape)
        )

    def _adamw(self, params: list[Tensor], group: dict) -> None:
        beta1, beta2 = group["betas"]
        adamw(
            params,
            [p.grad for p in params],
            [self._buffer(p, "exp_avg") for p in params],
            [self._buffer(p, "exp_avg_sq") for p in params],
            [],  # amsgrad's
            [self._step_count(p) for p in params],
            fused=group["fused"],
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )

    def _buffer(self, param: Tensor, name: str) -> Tensor:
        state = self.state[param]
        if name not in state:
            state[name] = torch.zeros_like(param)
        return state[name]

    def _step_count(self, param: Tensor) -> Tensor:
        state = self.state[param]
        if "step" not in state:
            state["step"] = torch.zeros(
                (), dtype=torch.float32, device=param.device
            )  # a tensor: the fused kernel reads it there
        return state["step"]


def _by_shape(params: list[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple, list[Tensor]] = {}
    for p in params:
        groups.setdefault((p.shape, p.dtype, p.device), []).append(p)
    return list(groups.values())


def param_groups(model: nn.Module, config: OptimConfig) -> list[dict]:
    """The groups for MuonAdamW: named "muon" (matrices in `blocks.`), "decay" (other matrices) and "no_decay" (norms, biases).

    Groups without parameters are left out, frozen parameters too; a tied weight counts once.
    Raises ValueError if there is nothing to train, or nothing for Muon, or if a parameter is not in exactly one group.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}  # names a tied weight once
    muon = {name for name, p in named.items() if config.kind == "muon" and "blocks." in name and p.ndim == 2}
    if not named:
        raise ValueError("the model has no trainable parameters; unfreeze some")
    if config.kind == "muon" and not muon:
        raise ValueError("optim.kind=muon finds no trainable matrix inside `blocks.`; use optim=adamw")
    shared = {
        "lr": config.lr,
        "betas": tuple(config.betas),
        "eps": config.eps,
        "fused": True,
    }  # CPU, CUDA and MPS have the kernel
    groups = [
        {
            "name": "muon",
            "kind": "muon",
            "params": [p for name, p in named.items() if name in muon],
            "lr": config.muon_lr,
            "weight_decay": config.muon_weight_decay,
            "momentum": config.momentum,
            "nesterov": config.nesterov,
            "ns_steps": config.ns_steps,
            "adjust_lr": config.adjust_lr,
        },
        {
            "name": "decay",
            "kind": "adamw",
            "params": [p for name, p in named.items() if name not in muon and p.ndim >= 2],
            "weight_decay": config.weight_decay,
            **shared,
        },
        {
            "name": "no_decay",
            "kind": "adamw",
            "params": [p for p in named.values() if p.ndim < 2],
            "weight_decay": 0.0,
            **shared,
        },
    ]
    check_partition(named, groups)
    return [group for group in groups if group["params"]]


def check_partition(named: dict[str, Tensor], groups: list[dict]) -> None:
    """Raises ValueError naming each parameter that is not in exactly one of the groups."""
    places = Counter(id(p) for group in groups for p in group["params"])
    wrong = [f"{name} (in {places[id(p)]})" for name, p in named.items() if places[id(p)] != 1]
    if wrong:
        raise ValueError(
            f"every parameter belongs in exactly 1 optimizer group, unlike {', '.join(wrong)}; correct param_groups"
        )


def build_optimizer(model: nn.Module, config: OptimConfig) -> MuonAdamW:
    """The optimizer for a model; apply `lr_factor` to it through LambdaLR."""
    return MuonAdamW(param_groups(model, config))
