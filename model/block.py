"""A block of a GPT: attention and FFN, each on a normalized input and added to the residual stream.

B batch, T positions, C width.
"""

from torch import Tensor, nn

from tril.model.attention import MultiHeadAttention
from tril.model.config import GPTConfig
from tril.model.layers import MLP, make_norm


class Block(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + FFN(norm(x)). A part that the config leaves out is None."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        has_attn, has_mlp = config.n_heads > 0, config.mlp != "none"
        mlp = {"kind": config.mlp, "bias": config.bias, "dropout": config.resid_dropout}
        self.norm1 = block_norm(config) if has_attn else None
        self.attn = make_attention(config) if has_attn else None
        self.norm2 = block_norm(config) if has_mlp else None
        self.mlp = MLP(config.dim, config.mlp_size, **mlp) if has_mlp else None

    def forward(self, x: Tensor, *, last_only: bool = False, **options) -> Tensor:
        """x (B, T, C) -> (B, T, C), with `last_only` (B, 1, C).

        Args:
            last_only, **options: those of `MultiHeadAttention.forward`; not `need_weights`.
        """
        out = x[:, -1:] if last_only else x
        if self.attn is not None and self.norm1 is not None:
            out = out + self.attn(self.norm1(x), last_only=last_only, **options)
        if self.mlp is not None and self.norm2 is not None:
            out = out + self.mlp(self.norm2(out))
        return out


def call_block(block: Block, x: Tensor, **options) -> Tensor:
    """Runs the block. One compiled version of this function serves every block (regional compilation,
    https://docs.pytorch.org/tutorials/recipes/regional_compilation.html)."""
    return block(x, **options)


def make_attention(config: GPTConfig) -> MultiHeadAttention:
    return MultiHeadAttention(
        config.dim,
        config.n_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        causal=config.causal,
        window=config.window,
        qkv_bias=config.bias if config.qkv_bias is None else config.qkv_bias,
        out_bias=config.bias,
        qk_norm=config.qk_norm,
        norm_eps=config.norm_eps,
        attn_dropout=config.attn_dropout,
        resid_dropout=config.resid_dropout,
        backend=config.backend,
    )


def block_norm(config: GPTConfig) -> nn.Module:
    return make_norm(config.norm, config.dim, eps=config.norm_eps, bias=config.bias)
