"""Tril in one file: the default model and its training, in plain PyTorch.

    python docs/tril_in_one_file.py notes.txt 200      # a text, and the number of steps

To read after docs/attention.md. The file imports nothing from tril: a test trains both on the same text from the same
weights, and compares the loss of each step. It leaves out everything around: settings, tokenizers (a token is a byte),
mixed precision, checkpoints, the KV cache, and the certificate.

Where each part comes from:
    transformer, causal mask    Vaswani et al. 2017, arXiv:1706.03762
    pre-norm, tied embeddings   Radford et al. 2019 (GPT-2)
    RMSNorm                     Zhang and Sennrich 2019, arXiv:1910.07467
    rotary positions            Su et al. 2021, arXiv:2104.09864
    normalized q and k          Henry et al. 2020, arXiv:2010.04245
    squared ReLU                So et al. 2021, arXiv:2109.08668
    offset keys, embedding skips, value embeddings, Muon    Jordan et al. 2024, github.com/KellerJordan/modded-nanogpt
    AdamW                       Loshchilov and Hutter 2017, arXiv:1711.05101
    warmup, stable, decay       Hägele et al. 2024, arXiv:2405.18392
    short windows first         Press, Smith and Lewis 2021, arXiv:2012.15832

B batch, T tokens, H heads, D head size, C width, V vocabulary.
"""

import itertools
import math
import sys
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE = -100  # a target without a loss, which is the default of cross_entropy


# --- The model


class Attention(nn.Module):
    """Multi-head causal self-attention: softmax(q k^T / sqrt(D) + mask) v in each head, with normalized, rotated q and
    k, and offset keys."""

    def __init__(self, dim: int, n_heads: int):
        super().__init__()
        self.n_heads, self.head_dim = n_heads, dim // n_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(self.head_dim), nn.RMSNorm(self.head_dim)

    def forward(self, x: Tensor, value_bias: Tensor) -> Tensor:
        """x and value_bias (B, T, C) -> (B, T, C)."""
        n_tokens = x.shape[1]
        q, k, v = (
            each.unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2)  # (B, H, T, D)
            for each in (self.q_proj(x), self.k_proj(x), self.v_proj(x) + value_bias)
        )
        q, k = rotate(self.q_norm(q)), offset(rotate(self.k_norm(k)))
        scores = q @ k.mT / math.sqrt(self.head_dim)  # (B, H, T, T)
        visible = torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=x.device).tril()  # query i sees keys 0 ... i
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        out = weights @ v  # (B, H, T, D)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # (B, T, C)


def rotate(x: Tensor) -> Tensor:
    """Rotates the pairs (i, i + D/2) of x (B, H, T, D) by angles proportional to the position, so that q k depends on
    the distance only."""
    n_tokens, size = x.shape[-2:]
    frequency = 10_000.0 ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)  # (D/2,)
    angle = torch.arange(n_tokens, dtype=torch.float64)[:, None] * frequency  # (T, D/2)
    cos, sin = angle.cos().to(x), angle.sin().to(x)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def offset(k: Tensor) -> Tensor:
    """Takes half of each key (B, H, T, D) from the position before: a query that matches a token finds its successor.

    It moves the slower half of the rotary pairs.
    """
    half = k.shape[-1] // 2
    moves = torch.arange(k.shape[-1], device=k.device) % half >= (half + 1) // 2  # (D,)
    before = F.pad(k[..., :-1, :], (0, 0, 1, 0))  # zeros before the first
    return torch.where(moves, before, k)


class MLP(nn.Module):
    """The feed-forward network, with a squared ReLU: (B, T, C) -> (B, T, C)."""

    def __init__(self, dim: int):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu().square())


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)). Two learned factors bring the token's embeddings back."""

    def __init__(self, dim: int, n_heads: int):
        super().__init__()
        self.embed_factor, self.value_factor = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(dim))
        self.norm1, self.attn = nn.RMSNorm(dim), Attention(dim, n_heads)
        self.norm2, self.mlp = nn.RMSNorm(dim), MLP(dim)

    def forward(self, x: Tensor, embedding: Tensor, value_embedding: Tensor) -> Tensor:
        x = x + self.embed_factor * embedding
        x = x + self.attn(self.norm1(x), self.value_factor * value_embedding)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Token ids (B, T) -> logits (B, T, V): the scores of the next token, at every position."""

    def __init__(self, vocab_size: int, context_length: int = 512, n_layers: int = 4, dim: int = 192, n_heads: int = 2):
        super().__init__()
        self.context_length = context_length
        self.embed, self.value_embed = nn.Embedding(vocab_size, dim), nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(Block(dim, n_heads) for _ in range(n_layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, vocab_size, bias=False)
        self.head.weight = self.embed.weight
        initialize(self)

    def forward(self, ids: Tensor) -> Tensor:
        embedding, value_embedding = self.embed(ids), self.value_embed(ids)  # (B, T, C)
        x = embedding
        for block in self.blocks:
            x = block(x, embedding, value_embedding)
        return self.head(self.norm(x))


@torch.no_grad()
def initialize(model: GPT) -> None:
    """Draws the first weights.

    Matrices that write to the residual stream are 0, so each block starts as the identity, and training decides how
    fast it grows.
    """
    for p in model.parameters():
        p.fill_(math.nan)
    for name, p in model.named_parameters():
        if name == "embed.weight":
            p.normal_(std=0.02)
        elif name == "value_embed.weight":
            p.normal_(std=0.5)
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "up.weight")):
            bound = 0.5 * math.sqrt(3 / p.shape[1])  # standard deviation 0.5 / sqrt(C)
            p.uniform_(-bound, bound)
        elif name.endswith(("o_proj.weight", "down.weight", "value_factor")):
            p.zero_()
        elif name.endswith("embed_factor"):
            p.fill_(0.1)
        elif "norm" in name:
            p.fill_(1.0)
    assert not any(p.isnan().any() for p in model.parameters()), "every parameter was initialized on purpose"


# --- The optimizer


def orthogonalize(update: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration: a matrix with the same singular vectors, and singular values between 0.68 and 1.21."""
    x = update.mT if update.shape[0] > update.shape[1] else update
    x = x / x.norm().clamp(min=1e-30)  # now no singular value is above 1
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if update.shape[0] > update.shape[1] else x


class Muon(torch.optim.Optimizer):
    """Gradient descent on matrices whose step is orthogonalized, so that all directions are learned equally fast."""

    def __init__(self, params: list[nn.Parameter], lr: float = 0.014, momentum: float = 0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalize(p.grad.lerp(average, group["momentum"]))  # Nesterov
                rows = update.norm(dim=1, keepdim=True)  # equal norms for all rows: Muon+, arXiv:2602.21545
                update *= (rows.square().mean().sqrt() / rows.clamp(min=1e-30)).clamp(max=2)
                p -= group["lr"] * math.sqrt(max(1, p.shape[0] / p.shape[1])) * update


def make_optimizers(model: GPT) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for embeddings, head, norms and factors."""
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if name.startswith("blocks.") and p.ndim == 2]
    others = [p for name, p in named.items() if "embed" in name or "norm" in name or name.endswith("_factor")]
    groups = [id(p) for p in matrices + others]
    assert sorted(groups) == sorted(id(p) for p in named.values()), "every parameter is in exactly one group"
    return [Muon(matrices), torch.optim.AdamW(others, lr=0.02, betas=(0.8, 0.99), eps=1e-8, weight_decay=0.0)]


def lr_factor(step: int, steps: int, warmup: int = 20, decay: float = 0.7, floor: float = 0.05) -> float:
    """The factor on both learning rates at a step: a linear warmup, a constant part, and a linear decay to `floor`."""
    warmup = warmup if warmup <= steps else steps // 10  # of a run that is shorter than the warmup
    if step < warmup:
        return (step + 1) / (warmup + 1)
    start = max(warmup, steps - round(decay * steps))  # of the decay
    return 1.0 - (1.0 - floor) * max(0, step - start) / max(1, steps - start)


# --- The data and the loop


def windows(tokens: Tensor, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets (T,) of windows without end. A target is the token after its input.

    In every epoch, the windows start from a new offset and come in a new order, and each token but the first is once a
    target. The text continues from its end to its start, and the last window is filled up with ignored targets.
    """
    n_targets = len(tokens) - 1
    for epoch in itertools.count():
        random = np.random.default_rng([seed, epoch])
        shift = int(random.integers(n_targets))
        for window in random.permutation(math.ceil(n_targets / length)).tolist():
            column = window * length + torch.arange(length)
            position = (column + shift) % n_targets
            yield tokens[position], tokens[position + 1].masked_fill(column >= n_targets, IGNORE)


def length_at(step: int, steps: int, context_length: int) -> int:
    """Tokens of a training sequence: a quarter of the context, from 30% of the run half of it, from 70% all of it.

    (Tril doubles lengths of 128 and more only, so a context below 512 starts with longer parts.)
    """
    if step < 0.3 * steps:
        return context_length // 4
    return context_length // 2 if step < 0.7 * steps else context_length


def train(model: GPT, tokens: Tensor, steps: int, *, batch_size: int = 4, seed: int = 0) -> Iterator[float]:
    """Trains on token ids (N,), and yields the loss of each step in nats per token.

    A step reads `batch_size` windows as long as the context, each cut into sequences of the length at that step.
    """
    optimizers, text = make_optimizers(model), windows(tokens, model.context_length, seed)
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    for step in range(steps):
        pairs = zip(*itertools.islice(text, batch_size), strict=True)
        length = length_at(step, steps, model.context_length)
        inputs, targets = (torch.stack(each).view(-1, length) for each in pairs)  # (B, T)
        nats = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
        model.zero_grad()
        (nats / targets.numel()).backward()  # ignored targets count, so that a window with few others weighs less
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * lr_factor(step, steps)
            optimizer.step()
        yield nats.item() / int((targets != IGNORE).sum())


@torch.no_grad()
def validate(model: GPT, tokens: Tensor) -> float:
    """Mean loss over all tokens but the first, in windows that do not overlap; nats per token."""
    total = 0.0
    for start in range(0, len(tokens) - 1, model.context_length):
        window = tokens[start : start + model.context_length + 1]
        total += F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="sum").item()
    return total / (len(tokens) - 1)


@torch.no_grad()
def sample(model: GPT, ids: list[int], n_tokens: int, temperature: float = 0.8) -> list[int]:
    """Continues a text, token by token, as in training, where no position saw a later token either."""
    for _ in range(n_tokens):
        logits = model(torch.tensor([ids[-model.context_length :]]))[0, -1]  # (V,)
        ids = [*ids, int(torch.multinomial((logits / temperature).softmax(-1), 1))]
    return ids


def main() -> None:
    path, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1600
    with open(path, "rb") as file:
        tokens = torch.tensor(list(file.read()))
    n_train = int(0.9 * len(tokens))
    torch.manual_seed(0)
    model = GPT(vocab_size=256)
    for step, loss in enumerate(train(model, tokens[:n_train], steps), start=1):
        if step % 20 == 0 or step == steps:
            print(f"step {step:>5}/{steps}  loss {loss:.3f}", flush=True)
    print(f"validation: {validate(model, tokens[n_train:]) / math.log(2):.4f} bits per byte")
    print(bytes(sample(model, tokens[n_train : n_train + 20].tolist(), 200)).decode(errors="replace"))


if __name__ == "__main__":
    main()
