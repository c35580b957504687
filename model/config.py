"""Every choice that defines a GPT, validated in one place."""

import json
import math
from dataclasses import asdict, fields, replace
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic.dataclasses import dataclass

from tril.data.settings import strict_settings
from tril.model.norm import LAYERNORM_EPS, norm_kind
from tril.model.rope import BASE

Size = Annotated[int, Field(ge=1, lt=2**48)]  # far above any model, and below what overflows in a product of two
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, lt=1)]

# Fields that need attention: with n_heads=0 they must keep their defaults.
ATTENTION_FIELDS = ("n_kv_heads", "head_dim", "window", "attn_dropout", "causal", "qkv_bias")


@dataclass(frozen=True, config=strict_settings("model"))
class GPTConfig:
    """Shape and parts of a GPT. The defaults are those of configs/model/nano.yaml.

    Args:
        vocab_size: rows of the embedding and of the head; may exceed the tokenizer's vocabulary (padding it to a
            multiple of 64 is faster on GPUs).
        context_length: longest sequence, in tokens.
        n_layers: number of blocks.
        dim: model width C.
        n_heads: query heads H; 0: blocks without attention, so that each position sees only itself.
        n_kv_heads: key/value heads G; None: n_heads.
        head_dim: head size D; None: dim / n_heads.
        mlp: FFN kind: relu, gelu (tanh approximation, as in GPT-2), gelu_erf (exact, as in nanoGPT), relu2 (So et al.
            2021), swiglu (Shazeer 2020), or none: blocks without FFN.
        mlp_ratio: hidden width / dim; swiglu, with three matrices, takes two thirds of it, so the parameter count is
            equal.
        mlp_hidden: hidden width of the FFN; None: from mlp_ratio.
        norm: normalization before attention, before the FFN and before the head.
        norm_eps: added to the mean square or the variance in all norms; None: torch's default, see
            `tril.model.norm.make_norm`.
        pos: rope (rotary), learned (a table), alibi (linear biases of the scores) or none (the causal mask alone tells
            positions apart).
        rope_base: theta of the rotary frequencies theta^(-2i/D).
        bias: biases in all projections, the FFN and layernorm (never in the head).
        qkv_bias: biases in the q, k and v projections; None: as `bias`.
        qk_norm: normalization of each head's q and k. True and False, from earlier versions, mean rmsnorm and none.
        tie_embeddings: the head uses the embedding matrix.
        embd_dropout: dropout after the embedding.
        attn_dropout: dropout on the attention weights.
        resid_dropout: dropout on both branches of a block.
        window: each query attends to its own position and the `window - 1` before it; None: to all of them.
        causal: False lets every position attend to every other: an ablation, not a language model.
        logit_softcap: c: logits become c * tanh(logits / c) (Gemma 2, 2024); None: off.
        init: initialization, see `tril.model.initialization.init_weights`.
        backend: see `tril.model.attention.attention`.
        checkpoint_activations: training keeps the input of each block only, and computes the block again in the
            backward pass: less memory for about a third more time, and the same gradients.

    Raises:
        ValueError: names every wrong value with its limit or the valid values.
    """

    vocab_size: Size
    context_length: Size = 256
    n_layers: Size = 4
    dim: Size = 192
    n_heads: Annotated[int, Field(ge=0)] = 4
    n_kv_heads: Size | None = None
    head_dim: Size | None = None
    mlp: Literal["relu", "gelu", "gelu_erf", "relu2", "swiglu", "none"] = "relu2"
    mlp_ratio: Annotated[float, Field(gt=0, lt=2**31)] = 4.0
    mlp_hidden: Size | None = None
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: Positive | None = None
    pos: Literal["rope", "learned", "alibi", "none"] = "rope"
    rope_base: Positive = BASE
    bias: bool = False
    qkv_bias: bool | None = None
    qk_norm: Annotated[Literal["rmsnorm", "layernorm", "none"], BeforeValidator(norm_kind)] = "rmsnorm"
    tie_embeddings: bool = True
    embd_dropout: Probability = 0.0
    attn_dropout: Probability = 0.0
    resid_dropout: Probability = 0.0
    window: Size | None = None
    causal: bool = True
    logit_softcap: Positive | None = None
    init: Literal["zero_out", "gpt2"] = "zero_out"
    backend: Literal["stacked", "explicit", "fused", "flex"] = "fused"
    checkpoint_activations: bool = False

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        problems = self._attention_problems() if self.n_heads else self._problems_without_attention()
        if self.window is not None and not self.causal:
            problems.append(f"model.window={self.window} needs model.causal=true")
        if self.backend == "flex" and self.attn_dropout > 0:
            dropout = f"model.attn_dropout={self.attn_dropout}"
            problems.append(f"model.backend=flex has no attention dropout ({dropout}); use model.backend=fused")
        if self.mlp != "none" and self.mlp_size < 1:
            ratio = f"model.mlp_ratio={self.mlp_ratio}"
            problems.append(f"{ratio} leaves the FFN without hidden units at model.dim={self.dim}; raise it")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _attention_problems(self) -> list[str]:
        problems = []
        if self.head_dim is None and self.dim % self.n_heads:
            small = [n for n in range(1, math.isqrt(self.dim) + 1) if self.dim % n == 0]
            divisors = {*small, *(self.dim // n for n in small)}
            nearest = sorted(sorted(divisors, key=lambda n: abs(n - self.n_heads))[:3])
            problems.append(
                f"model.n_heads={self.n_heads} must divide model.dim={self.dim}; use {', '.join(map(str, nearest))}, "
                "another dim, or set model.head_dim"
            )
        elif self.pos == "rope" and self.head_size % 2:
            problems.append(
                f"the head size {self.head_size} (model.head_dim, or dim / n_heads) must be even for model.pos=rope"
            )
        if self.n_heads % self.kv_heads:
            problems.append(f"model.n_kv_heads={self.n_kv_heads} must divide model.n_heads={self.n_heads}")
        return problems

    def _problems_without_attention(self) -> list[str]:
        defaults = {field.name: field.default for field in fields(self) if field.name in ATTENTION_FIELDS}
        problems = [
            f"model.{name}={getattr(self, name)} needs attention, and model.n_heads=0 leaves it out; "
            f"set model.{name}={json.dumps(default)}"
            for name, default in defaults.items()
            if getattr(self, name) != default
        ]
        if self.mlp == "none":
            problems.append("model.n_heads=0 with model.mlp=none leaves the blocks empty; keep one of the two")
        return problems

    def canonical(self) -> "GPTConfig":
        """The same model, with fields that have no effect set to one value, so that equal models have equal configs."""
        default = {field.name: field.default for field in fields(self)}
        longest = self.context_length
        single_key = self.n_heads == 0 or 1 in (longest, self.window)  # its weight is 1 for any q and k
        # The middle of all values of mlp_ratio that round to the same hidden width.
        middle_ratio = (self.mlp_size + 0.5) * self._mlp_matrices / (2 * self.dim)
        changes = {"mlp_ratio": default["mlp_ratio"] if self.mlp == "none" else middle_ratio, "mlp_hidden": None}
        if self.n_heads == 0:
            changes |= {"qk_norm": "none", "backend": default["backend"]}
        elif single_key and self.qk_norm == "layernorm":
            changes["qk_norm"] = "rmsnorm"  # which has the same parameters
        only_layernorm = self.norm == "layernorm" and (single_key or self.qk_norm != "rmsnorm")
        if only_layernorm and self.norm_eps == LAYERNORM_EPS:
            changes["norm_eps"] = None
        if self.n_kv_heads == self.n_heads:
            changes["n_kv_heads"] = None
        if self.n_heads and self.head_dim == self.dim / self.n_heads:
            changes["head_dim"] = None
        if self.window is not None and self.window >= longest:
            changes["window"] = None
        if longest == 1:
            changes["causal"] = True
        if self.qkv_bias == self.bias:
            changes["qkv_bias"] = None
        if self.pos in ("rope", "alibi") and single_key:
            changes["pos"] = "none"
        if self.pos != "rope" or single_key or self.head_size == 2:  # whose only frequency is theta^0
            changes["rope_base"] = default["rope_base"]
        return replace(self, **changes)

    @property
    def head_size(self) -> int:
        """D; 0 without attention."""
        if self.n_heads == 0:
            return 0
        return self.dim // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def kv_heads(self) -> int:
        """G; 0 without attention."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def mlp_size(self) -> int:
        """Hidden width of the FFN; 0 without FFN."""
        if self.mlp == "none":
            return 0
        return int(self.dim * self.mlp_ratio * 2 / self._mlp_matrices) if self.mlp_hidden is None else self.mlp_hidden

    @property
    def _mlp_matrices(self) -> int:
        return 3 if self.mlp == "swiglu" else 2

    def to_dict(self) -> dict:
        """Plain values for a checkpoint: GPTConfig(**config.to_dict()) == config."""
        return asdict(self)
