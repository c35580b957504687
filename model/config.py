"""Every choice that defines a GPT, declared and validated in one place. This module does not import torch."""

import math
from dataclasses import asdict, replace
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, WrapValidator, model_validator
from pydantic.dataclasses import dataclass

from tril.data.settings import canonical, setting, strict_settings

Size = Annotated[int, Field(ge=1, lt=2**30)]  # far above any model; torch can multiply two of them
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, lt=1)]
Norm = Literal["rmsnorm", "layernorm"]
NormOrBool = Annotated[  # True and False: rmsnorm and none
    Literal[Norm, "none"], BeforeValidator(lambda kind: {"True": "rmsnorm", "False": "none"}.get(repr(kind), kind))
]
SizeOrNone = Annotated[Size, WrapValidator(lambda value, check: None if value is None else check(value))]

GATED = ("swiglu",)  # FFN with a third matrix, of the gate


@dataclass(frozen=True, config=strict_settings("model"))
class GPTConfig:
    """Shape and parts of a GPT. `vocab_size` is None only while the text, which decides it, is unknown.

    The defaults are a plain pre-norm GPT; configs/model/ has the models that train.py trains.

    Raises:
        ValueError: names every wrong value with its limit or the valid values.
    """

    vocab_size: SizeOrNone = setting(None, "rows of the embedding; null: the tokenizer's; a larger one pads them")
    context_length: Size = setting(512, "tokens that the model reads at a time", common=True)
    n_layers: Size = setting(4, "blocks", common=True, le=10_000)
    dim: Size = setting(192, "width of the model", common=True)
    n_heads: int = setting(2, "heads; 0: blocks without attention", common=True, ge=0)
    n_kv_heads: Size | None = setting(None, "key/value heads; null: n_heads", common=True, needs="n_heads")
    head_dim: Size | None = setting(None, "size of a head; null: dim / n_heads", needs="n_heads")
    mlp: Literal["relu", "gelu", "gelu_erf", "relu2", "swiglu", "none"] = setting(
        "relu2", "kind of the FFN", common=True
    )
    mlp_ratio: float = setting(
        4.0, "hidden width of the FFN, relative to dim; swiglu: 2/3 of it", needs="mlp_hidden=null", gt=0, lt=2**31
    )
    mlp_hidden: Size | None = setting(None, "hidden width of the FFN; null: from mlp_ratio")
    norm: Norm = setting("rmsnorm", "normalization before attention, FFN and head", common=True)
    norm_eps: Positive | None = setting(None, "null: the machine epsilon for rmsnorm, 1e-5 for layernorm")
    pos: Literal["rope", "learned", "alibi", "none"] = setting("rope", "positional encoding", common=True)
    rope_base: Positive = setting(10_000.0, "base of the rotation frequencies", needs="pos=rope")
    bias: bool = setting(False, "biases in all projections, the FFN and layernorm", common=True)
    qkv_bias: bool | None = setting(None, "biases in the projections of q, k and v; null: bias", needs="n_heads")
    qk_norm: NormOrBool = setting("rmsnorm", "normalization of each head's q and k", common=True, needs="n_heads")
    key_offset: bool = setting(False, "take half of each key from the previous position", needs="n_heads")
    tie_embeddings: bool = setting(True, "the head uses the matrix of the embedding", common=True)
    embed_skip: bool = setting(False, "each block adds the embedding of the token to its input, times a learned factor")
    value_embed: bool = setting(
        False, "attention adds a second embedding of the token to its values, times learned factors", needs="n_heads"
    )
    embd_dropout: Probability = setting(0.0, "dropout of the embeddings")
    attn_dropout: Probability = setting(0.0, "dropout of the attention weights", needs="n_heads")
    resid_dropout: Probability = setting(0.0, "dropout on the outputs of attention and FFN", common=True)
    window: Size | None = setting(
        None, "keys that a query sees, its own included; null: all", common=True, needs="n_heads"
    )
    causal: bool = setting(True, "false: every position attends to all, for experiments", needs="n_heads")
    logit_softcap: Positive | None = setting(None, "c: logits become c * tanh(logits / c); null: off", ge=1e-3, le=1e6)
    init: Literal["zero_out", "gpt2"] = setting("zero_out", "initialization of the weights")
    backend: Literal["stacked", "explicit", "fused"] = setting("fused", "how attention is computed", needs="n_heads")
    checkpoint_activations: bool = setting(
        False, "compute each block again in the backward pass: less memory, more time"
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        problems = []
        if self.n_heads == 0 and self.mlp == "none":
            problems.append("model.n_heads=0 with model.mlp=none leaves the blocks empty; keep one of the two")
        if self.n_heads and self.head_dim is None and self.dim % self.n_heads:
            divisors = {n for i in range(1, math.isqrt(self.dim) + 1) if self.dim % i == 0 for n in (i, self.dim // i)}
            nearest = sorted(sorted(divisors, key=lambda n: abs(n - self.n_heads))[:3])
            remedy = f"use {', '.join(map(str, nearest))}, another dim, or set model.head_dim"
            problems.append(f"model.n_heads={self.n_heads} must divide model.dim={self.dim}; {remedy}")
        elif self.pos == "rope" and self.head_size % 2:
            size = f"the head size {self.head_size} (model.head_dim, or dim / n_heads)"
            problems.append(f"{size} must be even for model.pos=rope")
        if self.n_heads and self.n_heads % self.kv_heads:
            problems.append(f"model.n_kv_heads={self.n_kv_heads} must divide model.n_heads={self.n_heads}")
        if self.window is not None and not self.causal:
            problems.append(f"model.window={self.window} needs model.causal=true")
        if self.mlp != "none" and self.mlp_size < 1:
            ratio = f"model.mlp_ratio={self.mlp_ratio}"
            problems.append(f"{ratio} leaves the FFN without hidden units at model.dim={self.dim}; raise it")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def canonical(self) -> "GPTConfig":
        """The same model, with fields that have no effect set to one value, so that equal models have equal configs."""
        # The middle of all values of mlp_ratio that round to the same hidden width.
        middle_ratio = (self.mlp_size + 0.5) * self._mlp_matrices / (2 * self.dim)
        changes = {"mlp_ratio": 4.0 if self.mlp == "none" else middle_ratio, "mlp_hidden": None}
        changes["key_offset"] = self.key_offset and self.head_size >= 4  # a half of whole pairs
        if self.n_heads == 0 and self.pos in ("rope", "alibi"):  # these act in attention only
            changes["pos"] = "none"
        equals_none = {
            "n_kv_heads": self.n_kv_heads == self.n_heads,
            "head_dim": self.n_heads and self.head_dim == self.dim / self.n_heads,
            "qkv_bias": self.qkv_bias == self.bias,
            "window": self.window is not None and self.window >= self.context_length,
        }
        return canonical(replace(self, **changes | {name: None for name, equal in equals_none.items() if equal}))

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
    def value_embed_size(self) -> int:
        """Columns of the value embedding, G * D; 0: there is none."""
        return self.kv_heads * self.head_size * self.value_embed

    @property
    def mlp_size(self) -> int:
        """Hidden width of the FFN; 0 without FFN."""
        if self.mlp == "none":
            return 0
        return int(self.dim * self.mlp_ratio * 2 / self._mlp_matrices) if self.mlp_hidden is None else self.mlp_hidden

    @property
    def _mlp_matrices(self) -> int:
        return 3 if self.mlp in GATED else 2

    def to_dict(self) -> dict:
        """Plain values for a checkpoint: GPTConfig(**config.to_dict()) == config."""
        return asdict(self)
