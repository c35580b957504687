"""A GPT: token embedding, blocks of attention and FFN on a residual stream, final norm, LM head.

B batch, T queries, S keys, H heads, C width, V vocabulary, L layers.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tril.model.attention import MultiHeadAttention
from tril.model.config import GPTConfig
from tril.model.kv_cache import KVCache, LayerCache
from tril.model.norm import RMSNorm
from tril.model.rope import rope_table

__all__ = ["GPT", "MLP", "Block", "GPTConfig", "IGNORE"]

IGNORE = -100  # a target that counts for nothing, torch's default in cross_entropy


class MLP(nn.Module):
    """The position-wise FFN: up, nonlinearity (for swiglu times a gate), down, residual dropout. (B, T, C) -> (B, T, C)"""

    def __init__(self, dim: int, hidden: int, *, kind: str, bias: bool, dropout: float):
        super().__init__()
        self.kind = kind
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.gate = nn.Linear(dim, hidden, bias=bias) if kind == "swiglu" else None
        self.down = nn.Linear(hidden, dim, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)  # (B, T, hidden)
        match self.kind:
            case "relu":
                h = h.relu()
            case "gelu":
                h = F.gelu(h, approximate="tanh")
            case "gelu_erf":
                h = F.gelu(h)
            case "relu2":
                h = h.relu().square()
            case "swiglu":
                h = F.silu(self.gate(x)) * h
        return self.dropout(self.down(h))  # (B, T, C)


class Block(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + FFN(norm(x)). A part that the config leaves out is None, and so is its norm."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        has_attn, has_mlp = config.n_heads > 0, config.mlp != "none"
        self.norm1 = make_norm(config) if has_attn else None
        self.attn = make_attention(config) if has_attn else None
        self.norm2 = make_norm(config) if has_mlp else None
        self.mlp = (
            MLP(config.dim, config.mlp_hidden, kind=config.mlp, bias=config.bias, dropout=config.resid_dropout)
            if has_mlp
            else None
        )

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        cache: LayerCache | None = None,
        head_gate: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """x (B, T, C) -> (B, T, C), with `last_only` that of the last position alone, (B, 1, C)."""
        out = x[:, -1:] if last_only else x
        if self.attn is not None:
            out = out + self.attn(
                self.norm1(x), mask=mask, rope=rope, cache=cache, head_gate=head_gate, last_only=last_only
            )
        return out if self.mlp is None else out + self.mlp(self.norm2(out))


def call_block(block: Block, x: Tensor, **options) -> Tensor:
    """A function, so that one compiled form of it serves every block (torch's regional compilation,
    https://docs.pytorch.org/tutorials/recipes/regional_compilation.html)."""
    return block(x, **options)


class GPT(nn.Module):
    """Decoder-only transformer language model.

    model(ids) -> logits. `hidden` and `logits` are its two halves; `nll` is the loss per token.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.pos_embed = nn.Embedding(config.context_length, config.dim) if config.pos == "learned" else None
        self.embd_dropout = nn.Dropout(config.embd_dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = make_norm(config)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        if config.pos == "rope":
            cos, sin = rope_table(config.context_length, config.head_size)
            self.register_buffer("rope_cos", cos, persistent=False)  # (context_length, D/2); follows from the config
            self.register_buffer("rope_sin", sin, persistent=False)
        init_weights(self)

    def forward(
        self,
        ids: Tensor,
        *,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        head_gate: Tensor | None = None,
    ) -> Tensor:
        """ids (B, T) -> logits (B, T, V).

        cache      continue what it holds; it is advanced by T
        mask       boolean, True = may attend, or 0/1 integers, broadcastable to (B, H, T, S), on top of the causal mask; S counts the cached
                   positions
        positions  (T,) or (B, T), absolute; None: from the cache's length on. Rotary and learned positions use them, the mask does not
        head_gate  factor on each head's output, (L, H) or (L, B, H)

        Raises ValueError where the sequence outgrows `context_length`.
        """
        return self.logits(self.hidden(ids, cache=cache, mask=mask, positions=positions, head_gate=head_gate))

    def hidden(
        self,
        ids: Tensor,
        *,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        head_gate: Tensor | None = None,
        last_only: bool = False,
        run_block: Callable[..., Tensor] = call_block,
    ) -> Tensor:
        """ids (B, T) -> the normalised last hidden state (B, T, C); arguments as in `forward`, and

        newest     that of the last position alone, (B, 1, C): the last block then computes nothing else but all keys and values
        run_block  `call_block`, or what a compiler made of it
        """
        start = 0 if cache is None else cache.length
        end = start + ids.shape[1]
        if end > self.config.context_length:
            raise ValueError(
                f"{end} positions exceed context_length={self.config.context_length}; shorten the input or train a longer context"
            )
        if positions is None:
            positions = torch.arange(start, end, device=ids.device)  # (T,)
        if head_gate is not None and self.config.n_heads == 0:
            raise ValueError("head_gate needs heads, and this model has none (n_heads=0); leave the gate out")
        if head_gate is not None and head_gate.shape[0] != len(self.blocks):
            raise ValueError(
                f"head_gate of shape {tuple(head_gate.shape)} must begin with the {len(self.blocks)} layers"
            )

        x = self.embed(ids)  # (B, T, C)
        if self.pos_embed is not None:
            x = x + self.pos_embed(positions)
        x = self.embd_dropout(x)
        rope = self._rope(positions)
        for i, block in enumerate(self.blocks):
            x = run_block(
                block,
                x,
                mask=mask,
                rope=rope,
                cache=None if cache is None else cache.layer(i),
                head_gate=None if head_gate is None else head_gate[i],
                last_only=last_only and block is self.blocks[-1],
            )
        if cache is not None:
            cache.advance(ids.shape[1])
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, V)"""
        logits = self.head(hidden)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def nll(
        self,
        ids: Tensor,
        targets: Tensor,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        run_block: Callable[..., Tensor] = call_block,
    ) -> Tensor:
        """Negative log-likelihood of each target in nats, float32 (B, T); 0 where the target is IGNORE. run_block as in `hidden`."""
        hidden = self.hidden(ids, mask=mask, positions=positions, run_block=run_block)  # (B, T, C)
        logits = self.logits(hidden).float()  # (B, T, V); float32: bf16 would round the loss to 3 digits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none").view_as(
            targets
        )

    def new_cache(self, batch_size: int, capacity: int | None = None) -> KVCache:
        """An empty cache for this model, for `context_length` positions unless said otherwise."""
        config, weight = self.config, self.embed.weight
        capacity = config.context_length if capacity is None else capacity
        return KVCache(
            config.n_layers,
            batch_size,
            config.kv_heads,
            capacity,
            config.head_size,
            dtype=weight.dtype,
            device=weight.device,
        )

    def n_parameters(self, *, embeddings: bool = True) -> int:
        """Number of parameters; without embeddings: without the token table, the position table and the head (Kaplan et al. 2020)."""
        total = sum(p.numel() for p in self.parameters())  # a tied head is the embedding, and counted once
        if embeddings:
            return total
        outside = {id(m.weight): m.weight.numel() for m in (self.embed, self.pos_embed, self.head) if m is not None}
        return total - sum(outside.values())

    def flops_per_token(self, length: int | None = None) -> int:
        """FLOPs of one training token at sequences of `length` (default: context_length), forward and backward.

        6 N + 12 L (H D) T (PaLM, Chowdhery et al. 2022, appendix B). N are the weights that are multiplied: all but the look-up tables,
        with the head even where it is tied. T is the window where that is shorter. The causal half is not subtracted, as is usual.
        """
        config = self.config
        length = config.context_length if length is None else length
        seen = min(length, config.window or length)
        multiplied = self.n_parameters(embeddings=False) + self.head.weight.numel()
        return 6 * multiplied + 12 * config.n_layers * config.n_heads * config.head_size * seen

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """cos and sin for positions (T,) -> (T, D/2), or (B, T) -> (B, 1, T, D/2)"""
        if self.config.pos != "rope":
            return None
        cos, sin = self.rope_cos[positions], self.rope_sin[positions]
        return (cos, sin) if positions.dim() == 1 else (cos[:, None], sin[:, None])


def make_attention(config: GPTConfig) -> MultiHeadAttention:
    return MultiHeadAttention(
        config.dim,
        config.n_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        causal=config.causal,
        window=config.window,
        qkv_bias=config.bias,
        out_bias=config.bias,
        qk_norm=config.qk_norm,
        attn_dropout=config.attn_dropout,
        resid_dropout=config.resid_dropout,
        backend=config.backend,
    )


def make_norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm(config.dim)
    return nn.LayerNorm(config.dim, bias=config.bias)


@torch.no_grad()
def init_weights(model: GPT) -> None:
    """Draws all parameters from torch's global generator.

    | parameter                       | init=zero_out                 | init=gpt2 (Radford et al. 2019) |
    |---------------------------------|-------------------------------|---------------------------------|
    | embed                           | normal, std 1 (tied: 0.02)    | normal, std 0.02                |
    | pos_embed                       | normal, std 0.02              | normal, std 0.02                |
    | q, k, v; mlp up, gate           | uniform, std 0.5 / sqrt(C)    | normal, std 0.02                |
    | o_proj; mlp down                | 0: every block begins as identity | normal, std 0.02 / sqrt(N)  |
    | head, untied                    | 0: the first loss is ln V     | normal, std 0.02                |
    | norm gains                      | 1                             | 1                               |
    | biases                          | 0                             | 0                               |

    N is the number of branches that add up in the residual stream: 2 L, and L where blocks have no attention, or no FFN.
    """
    config = model.config
    branches = config.n_layers * ((config.n_heads > 0) + (config.mlp != "none"))
    small, residual = 0.02, 0.02 / branches**0.5
    bound = 0.5 * (3 / config.dim) ** 0.5  # a uniform on +-b has std b / sqrt(3)
    modern = config.init == "zero_out"
    for name, p in model.named_parameters():
        part = name.split(".")[-2]
        if p.ndim < 2:
            nn.init.constant_(p, 1.0 if name.endswith("weight") else 0.0)
        elif part in ("o_proj", "down"):
            nn.init.zeros_(p) if modern else nn.init.normal_(p, std=residual)
        elif part in ("q_proj", "k_proj", "v_proj", "up", "gate"):
            nn.init.uniform_(p, -bound, bound) if modern else nn.init.normal_(p, std=small)
        elif part == "embed":
            nn.init.normal_(p, std=1.0 if modern and not config.tie_embeddings else small)
        elif part == "head":
            nn.init.zeros_(p) if modern else nn.init.normal_(p, std=small)
        elif part == "pos_embed":
            nn.init.normal_(p, std=small)
        else:
            raise AssertionError(f"no initialisation for {name}")
