"""Every choice that defines a GPT, in one validated place."""

import json
import math
from collections.abc import Set
from dataclasses import Field, asdict, dataclass, fields, replace

from tril.model.backends import BACKENDS

CHOICES = {
    "mlp": ("relu", "gelu", "gelu_erf", "relu2", "swiglu", "none"),
    "norm": ("rmsnorm", "layernorm"),
    "pos": ("rope", "learned", "none"),
    "init": ("zero_out", "gpt2"),
    "backend": tuple(BACKENDS),
}
SIZES = ("vocab_size", "context_length", "n_layers", "dim", "n_heads", "n_kv_heads", "head_dim", "window")
OF_ATTENTION = (
    "n_kv_heads",
    "head_dim",
    "window",
    "attn_dropout",
    "causal",
)  # at their defaults, or refused, where there is none


@dataclass(frozen=True)
class GPTConfig:
    """Shape and parts of a GPT. Raises one ValueError that lists every wrong value with the legal ones.

    vocab_size       rows of the embedding and of the head; may exceed the tokenizer's (padding to a multiple of 64 is faster on GPUs)
    context_length   longest sequence, in tokens
    n_layers, dim    blocks and width C
    n_heads          query heads; n_kv_heads (None: n_heads) key/value heads; head_dim (None: dim / n_heads) the head size D.
                     n_heads=0: blocks without attention, so that each position sees itself alone
    mlp              relu | gelu (tanh form, as in GPT-2) | gelu_erf (the exact form, as in nanoGPT) | relu2 (So et al. 2021) |
                     swiglu (Shazeer 2020) | none: blocks without FFN
    mlp_ratio        hidden width / dim; swiglu, with three matrices, takes two thirds of it so that the parameters stay equal
    norm             rmsnorm | layernorm, before attention, before the FFN and before the head
    pos              rope (rotary) | learned (a table) | none (the causal mask alone)
    bias             biases in all projections, the FFN and layernorm (never in the head)
    qk_norm          RMS-normalise each head's q and k
    tie_embeddings   the head uses the embedding's matrix
    *_dropout        after the embedding, on the attention weights, on both branches of a block
    window           each position sees this many newest ones, its own included; None: all
    causal           False lets every position see every other: no language model, but an ablation
    logit_softcap    c: logits become c * tanh(logits / c) (Gemma 2, 2024); None: off
    init             zero_out | gpt2, see `model.gpt.init_weights`
    backend          stacked | explicit | fused | flex, see `model.attention.attention`
    """

    vocab_size: int
    context_length: int = 256
    n_layers: int = 4
    dim: int = 192
    n_heads: int = 4
    n_kv_heads: int | None = None
    head_dim: int | None = None
    mlp: str = "relu2"
    mlp_ratio: float = 4.0
    norm: str = "rmsnorm"
    pos: str = "rope"
    bias: bool = False
    qk_norm: bool = True
    tie_embeddings: bool = False
    embd_dropout: float = 0.0
    attn_dropout: float = 0.0
    resid_dropout: float = 0.0
    window: int | None = None
    causal: bool = True
    logit_softcap: float | None = None
    init: str = "zero_out"
    backend: str = "fused"

    def __post_init__(self):
        wrong = {field.name: problem for field in fields(self) if (problem := self._problem(field))}
        messages = [f"model.{name}={problem}" for name, problem in wrong.items()]
        messages += self._wrong_combinations(wrong.keys())
        if messages:
            raise ValueError("; ".join(messages))

    def _problem(self, field: Field) -> str | None:
        """The field's value and what it must be, unless it is."""
        name, value = field.name, getattr(self, field.name)
        types = field.type | int if "float" in str(field.type) else field.type  # a whole number is a number too
        if not isinstance(value, types) or (isinstance(value, bool) and field.type is not bool):
            return f"{value!r} must be {getattr(field.type, '__name__', field.type)}"
        if name in CHOICES and value not in CHOICES[name]:
            return f"{value} must be one of {', '.join(CHOICES[name])}"
        if value is None:
            return None
        if name in SIZES and value < (least := 0 if name == "n_heads" else 1):
            return f"{value} must be at least {least}"
        if name in ("mlp_ratio", "logit_softcap") and not 0 < value < math.inf:
            return f"{value} must be above 0 and finite"
        if name.endswith("_dropout") and not 0 <= value < 1:
            return f"{value} must be at least 0 and below 1"
        return None

    def _wrong_combinations(self, wrong: Set[str]) -> list[str]:
        """Of fields that are right on their own."""
        found = []
        if "n_heads" not in wrong and self.n_heads == 0:
            found += self._of_attention_alone(wrong)
        elif not wrong & {"dim", "n_heads", "head_dim"}:
            if self.head_dim is None and self.dim % self.n_heads:
                near = sorted(
                    (n for n in range(1, self.dim + 1) if self.dim % n == 0), key=lambda n: abs(n - self.n_heads)
                )[:3]
                found.append(
                    f"model.n_heads={self.n_heads} does not divide model.dim={self.dim}; "
                    f"take n_heads={' or '.join(map(str, sorted(near)))}, another dim, or set model.head_dim"
                )
            elif self.pos == "rope" and self.head_size % 2:
                found.append(
                    f"a head size of {self.head_size} (model.head_dim, or dim / n_heads) must be even for model.pos=rope"
                )
        if not wrong & {"n_heads", "n_kv_heads"} and self.n_heads and self.n_heads % self.kv_heads:
            found.append(f"model.n_kv_heads={self.n_kv_heads} does not divide model.n_heads={self.n_heads}")
        if not wrong & {"window", "causal"} and self.window is not None and not self.causal:
            found.append(f"model.window={self.window} needs model.causal=true")
        if "attn_dropout" not in wrong and self.backend == "flex" and self.attn_dropout > 0:
            found.append(
                f"model.backend=flex has no attention dropout (model.attn_dropout={self.attn_dropout}); use backend=fused"
            )
        if not wrong & {"dim", "mlp_ratio"} and self.mlp != "none" and self.mlp_hidden < 1:
            found.append(
                f"model.mlp_ratio={self.mlp_ratio} leaves the FFN without hidden units at model.dim={self.dim}"
            )
        return found

    def _of_attention_alone(self, wrong: Set[str]) -> list[str]:
        """What cannot be together with n_heads=0."""
        off = {field.name: field.default for field in fields(self) if field.name in OF_ATTENTION}
        found = [
            f"model.{name}={getattr(self, name)} is of attention, which model.n_heads=0 leaves out; set model.{name}={json.dumps(value)}"
            for name, value in off.items()
            if name not in wrong and getattr(self, name) != value
        ]
        if "mlp" not in wrong and self.mlp == "none":
            found.append("model.n_heads=0 with model.mlp=none leaves nothing in the blocks; keep one of the two parts")
        return found

    def canonical(self) -> "GPTConfig":
        """The same model with every field that has no effect brought to one value, so that two configurations of one model are equal."""
        default = {field.name: field.default for field in fields(self)}
        longest = self.context_length
        lone_key = self.n_heads == 0 or 1 in (longest, self.window)  # whose weight is 1, whatever q and k are
        changes = {"mlp_ratio": default["mlp_ratio"] if self.mlp == "none" else self._middle_ratio}
        if self.n_heads == 0:
            changes |= {"qk_norm": False, "backend": default["backend"]}
        if self.n_kv_heads == self.n_heads:
            changes["n_kv_heads"] = None
        if self.n_heads and self.head_dim == self.dim / self.n_heads:
            changes["head_dim"] = None
        if self.window is not None and self.window >= longest:
            changes["window"] = None
        if longest == 1:
            changes["causal"] = True
        if self.pos == "rope" and lone_key:
            changes["pos"] = "none"
        return replace(self, **changes)

    @property
    def _middle_ratio(self) -> float:
        """Of the values of mlp_ratio that round to the same hidden width, the one in the middle."""
        return (self.mlp_hidden + 0.5) * self._mlp_matrices / (2 * self.dim)

    @property
    def _mlp_matrices(self) -> int:
        return 3 if self.mlp == "swiglu" else 2

    @property
    def head_size(self) -> int:
        """D; 0 without attention"""
        if self.n_heads == 0:
            return 0
        return self.dim // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def kv_heads(self) -> int:
        """G; 0 without attention"""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def mlp_hidden(self) -> int:
        """Width between the FFN's matrices; 0 without FFN."""
        return 0 if self.mlp == "none" else int(self.dim * self.mlp_ratio * 2 / self._mlp_matrices)

    def to_dict(self) -> dict:
        """Plain values, for a checkpoint: GPTConfig(**config.to_dict()) == config."""
        return asdict(self)
