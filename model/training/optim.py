"""One optimizer for two rules: Muon for the weight matrices inside the blocks, AdamW for everything else.

AdamW scales the step of each weight by the history of its gradient. Muon updates a matrix as a whole: it replaces the
momentum by a nearly orthogonal matrix with the same singular vectors, so that all directions are learned equally fast.

Muon: Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/   AdamW: https://arxiv.org/abs/1711.05101
"""

# pyright: reportPrivateImportUsage=false
# torch._foreach_* are the functions of torch.optim for many tensors at once.

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tril.model.gpt import GPT
from tril.model.training.settings import OptimConfig

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's quintic: steepest slope at 0 that keeps large values near 1
FLOAT32_EXPONENT = 0x7F800000  # its bits
DECAYS = ("weight_decay", "muon_weight_decay")  # the settings
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


def suitable_decay(passes: float) -> float:
    """The weight decay, of Muon and its AdamW, that suits a run of so many passes over its text (docs/log.md)."""
    return 0.0 if passes <= 1 else min(round(passes / 4, 2), 2.0)


def capture(work: Callable[[], object]) -> Callable[[], object]:
    """A CUDA graph of the kernels that `work` launches, which starts all of them at once."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


class GraphedUpdate:
    """An update of all parameters as a CUDA graph: a GPU updates a small model faster than the host launches kernels.

    A graph reads and writes fixed addresses. So the first update with gradients at other addresses than before is not
    captured, and the second one is. Gradients whose addresses change at every step are never captured.

    Args:
        update: of a learning rate for each group, 0-dim tensors on the device of the gradients.
    """

    def __init__(self, update: Callable[[Sequence[Tensor]], None]) -> None:
        self._update = update
        self._rates: Tensor | None = None
        self._addresses: list[int] = []
        self._replay: Callable[[], object] | None = None

    def __call__(self, rates: Sequence[float], gradients: Sequence[Tensor]) -> None:
        if self._rates is None:
            self._rates = torch.empty(len(rates), device=gradients[0].device)
        self._rates.copy_(torch.tensor(rates))
        work, addresses = functools.partial(self._update, self._rates.unbind()), [x.data_ptr() for x in gradients]
        if addresses != self._addresses:
            self._addresses, self._replay = addresses, None
            work()
            return
        self._replay = self._replay or capture(work)
        self._replay()


class MuonAdamW(torch.optim.Optimizer):
    """Updates parameter groups of kind="muon" (2-D parameters only) and kind="adamw", each by its rule, in one `step`.

    Muon follows torch.optim.Muon, which computes in bf16 in every run, one matrix at a time; here, all matrices of one
    shape are orthogonalized in one batch. AdamW is torch's fused kernel.

    Args:
        groups: as `param_groups` makes them; there are no defaults.
        products: the dtype of Muon's matrix products. A checkpoint does not hold it.
        graphs: update through a CUDA graph, see `GraphedUpdate`.
    """

    def __init__(self, groups: Iterable[dict], products: torch.dtype = torch.float32, graphs: bool = False) -> None:
        super().__init__(groups, defaults={})
        self.products = products
        self._graphed = GraphedUpdate(self._update) if graphs else None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replaces the state, and with it the addresses that a CUDA graph has."""
        super().load_state_dict(state_dict)
        self._graphed = self._graphed and GraphedUpdate(self._update)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Updates every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():  # Lightning runs forward and backward inside the closure
                loss = closure()
        rates = [group["lr"] for group in self.param_groups]
        if self._graphed is None:
            self._update(rates)
        else:
            self._graphed(rates, [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None])
        return loss

    def _update(self, rates: Sequence[float | Tensor]) -> None:
        """Updates the parameters of each group with its learning rate."""
        for group, rate in zip(self.param_groups, rates, strict=True):
            params = [p for p in group["params"] if p.grad is not None]
            if group["kind"] == "adamw":
                self._adamw(params, group, rate)
                continue
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in params:
                by_shape[p.shape].append(p)
            for same in by_shape.values():
                self._muon(same, group, rate)

    def _muon(self, params: list[Tensor], group: dict, rate: float | Tensor) -> None:
        """One Muon step for parameters of one shape.

        adjust_lr="original" (Jordan) raises the learning rate of tall matrices; "match_rms_adamw" (Liu et al.) gives
        updates of AdamW's size, so that AdamW's learning rate and weight decay suit Muon too.
        """
        rows, columns = params[0].shape
        ratio = math.sqrt(max(1, rows / columns))
        if group["adjust_lr"] == "match_rms_adamw":
            ratio = MATCH_RMS * math.sqrt(max(rows, columns))
        grads = [p.grad for p in params if p.grad is not None]
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        # In torch 2.14, wrong on MPS for bf16 and float16: there the weights of a run are float32 by default.
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        updates = torch._foreach_lerp(grads, buffers, group["momentum"]) if group["nesterov"] else buffers
        directions = orthogonalize(torch.stack(updates).to(self.products), group["ns_steps"])
        # Contiguous for the fast foreach kernel.
        directions = directions.to(params[0].dtype, memory_format=torch.contiguous_format)
        directions *= rate * ratio
        torch._foreach_mul_(params, 1 - rate * group["weight_decay"])
        torch._foreach_sub_(params, directions.unbind())

    def _adamw(self, params: list[Tensor], group: dict, rate: float | Tensor) -> None:
        for p in params:
            if "step" not in self.state[p]:  # the fused kernel reads the step on the device
                step = torch.zeros((), dtype=torch.float32, device=p.device)
                self.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        averages, squares, steps = ([self.state[p][k] for p in params] for k in ("exp_avg", "exp_avg_sq", "step"))
        grads = [p.grad for p in params if p.grad is not None]
        beta1, beta2 = group["betas"]
        options = {key: group[key] for key in ("weight_decay", "eps", "fused")}
        options |= {"lr": rate, "beta1": beta1, "beta2": beta2, "amsgrad": False, "maximize": False}
        adamw(params, grads, averages, squares, [], steps, **options)  # [] is for amsgrad


def param_groups(model: GPT, config: OptimConfig) -> list[dict]:
    """The groups for MuonAdamW: "muon" (matrices in `blocks.`), "decay" (other matrices), "no_decay" (norms, biases).

    Frozen parameters are left out; a tied weight counts once.
    """
    muon = {key: getattr(config, key) for key in ("momentum", "nesterov", "ns_steps", "adjust_lr")}
    muon |= {"kind": "muon", "lr": config.lr_scale * config.muon_lr, "weight_decay": config.muon_weight_decay}
    adam = {"kind": "adamw", "lr": config.lr_scale * config.lr, "betas": config.betas, "eps": config.eps, "fused": True}
    options = {
        "muon": muon,
        "decay": adam | {"weight_decay": config.weight_decay},
        "no_decay": adam | {"weight_decay": 0.0},
    }
    groups = {name: {"name": name, "params": []} | each for name, each in options.items()}
    for name, p in model.named_parameters():  # lists a tied weight once
        if not p.requires_grad:
            continue
        by_muon = config.kind == "muon" and "blocks." in name and p.ndim == 2
        chosen = "muon" if by_muon else "decay" if p.ndim >= 2 else "no_decay"
        groups[chosen]["params"].append(p)
    return [group for group in groups.values() if group["params"]]


def build_optimizer(model: GPT, config: OptimConfig, precision: str = "32-true", *, graphs: bool = False) -> MuonAdamW:
    """The optimizer of a model in a run of this precision; LambdaLR applies `lr_factor` to it.

    Muon multiplies matrices in bf16 in a run with bf16, on every processor, and in float32 in any other: float16 has
    no room for small gradients, of 1e-8 nothing is left.
    """
    products = torch.bfloat16 if precision.startswith("bf16") else torch.float32
    return MuonAdamW(param_groups(model, config), products, graphs)
