"""Whole models against Hugging Face's `transformers`: GPT-2 and Qwen3, the same random weights in both, the same logits out.

B batch, T queries, S keys, H query heads, G key/value heads, D head size, C width, V vocabulary.
"""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from tests.conftest import GPT2, assert_close, randomise
from tril.model.gpt import GPT, GPTConfig

B, V = 3, 61
LIMIT = 1e-4  # absolute, on logits in float32
QWEN3 = {"pos": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "qk_norm": True}

GPT2_SHAPES = {
    "one head": {"n_layers": 1, "dim": 16, "n_heads": 1, "context_length": 8},
    "four heads": {"n_layers": 3, "dim": 32, "n_heads": 4, "context_length": 17},
    "odd sizes": {"n_layers": 2, "dim": 30, "n_heads": 6, "context_length": 13, "mlp_ratio": 1.5},
}
QWEN3_SHAPES = {
    "full heads, tied": {"n_layers": 2, "dim": 32, "n_heads": 4, "context_length": 17, "tie_embeddings": True},
    "grouped, wide heads": {
        "n_layers": 3,
        "dim": 24,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 16,
        "context_length": 12,
    },
    "one shared, narrow heads": {
        "n_layers": 2,
        "dim": 40,
        "n_heads": 6,
        "n_kv_heads": 1,
        "head_dim": 4,
        "context_length": 40,
    },
    "window": {"n_layers": 2, "dim": 36, "n_heads": 6, "n_kv_heads": 3, "context_length": 14, "window": 4},
}
MODELS = [pytest.param(GPT2 | shape, id=f"GPT-2, {name}") for name, shape in GPT2_SHAPES.items()]
MODELS += [pytest.param(QWEN3 | shape, id=f"Qwen3, {name}") for name, shape in QWEN3_SHAPES.items()]


# -- the same model twice --------------------------------------------------------------------------------------------------------------


def pair(choices, *, kernel="eager", backend="fused"):
    """Their model with random weights, and ours with the same. `kernel` is how theirs computes attention, `backend` how ours does."""
    config = GPTConfig(**{**choices, "vocab_size": V, "backend": backend})
    make, translate = (their_gpt2, weights_of_gpt2) if config.pos == "learned" else (their_qwen3, weights_of_qwen3)
    theirs = randomise(make(config, kernel)).eval()
    left = dict(theirs.named_parameters())  # a tied head is the embedding, and named once
    weights = translate(left, config)  # takes out what it uses
    assert not left, f"without a counterpart here: {', '.join(left)}"
    ours = GPT(config).eval()
    ours.load_state_dict(weights)  # strict: raises if one of ours has no counterpart there
    return theirs, ours


def their_gpt2(config: GPTConfig, kernel: str) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.context_length,
            n_layer=config.n_layers,
            n_embd=config.dim,
            n_head=config.n_heads,
            n_inner=config.mlp_hidden,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation=kernel,
        )
    )


def their_qwen3(config: GPTConfig, kernel: str) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=config.vocab_size,
            max_position_embeddings=config.context_length,
            num_hidden_layers=config.n_layers,
            hidden_size=config.dim,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_size,
            intermediate_size=config.mlp_hidden,
            tie_word_embeddings=config.tie_embeddings,
            rope_theta=10_000.0,
            rms_norm_eps=torch.finfo(torch.float32).eps,  # torch's default, which model.norm keeps
            use_sliding_window=config.window is not None,
            sliding_window=config.window,
            max_window_layers=0,  # the number of layers, from the first, that do without the window
            attn_implementation=kernel,
        )
    )


def weights_of_gpt2(left: dict, config: GPTConfig) -> dict:
    """Our state_dict out of GPT-2's parameters. Its matrices are (in, out), those of nn.Linear (out, in)."""
    ours = {"embed.weight": left.pop("transformer.wte.weight"), "pos_embed.weight": left.pop("transformer.wpe.weight")}
    ours["head.weight"] = ours["embed.weight"]

    def take(their_name, *names):  # several of ours lie side by side in one of theirs
        for kind in ("weight", "bias"):
            for name, x in zip(names, left.pop(f"{their_name}.{kind}").chunk(len(names), dim=-1)):
                ours[f"{name}.{kind}"] = x.mT if x.ndim == 2 else x

    for i in range(config.n_layers):
        block, theirs = f"blocks.{i}", f"transformer.h.{i}"
        take(f"{theirs}.ln_1", f"{block}.norm1")
        take(f"{theirs}.attn.c_attn", *(f"{block}.attn.{part}_proj" for part in "qkv"))  # (C, 3 C)
        take(f"{theirs}.attn.c_proj", f"{block}.attn.o_proj")
        take(f"{theirs}.ln_2", f"{block}.norm2")
        take(f"{theirs}.mlp.c_fc", f"{block}.mlp.up")
        take(f"{theirs}.mlp.c_proj", f"{block}.mlp.down")
    take("transformer.ln_f", "norm")
    return ours


def weights_of_qwen3(left: dict, config: GPTConfig) -> dict:
    """Our state_dict out of Qwen3's parameters, which differ in their names alone."""
    ours = {"embed.weight": left.pop("model.embed_tokens.weight"), "norm.weight": left.pop("model.norm.weight")}
    ours["head.weight"] = ours["embed.weight"] if config.tie_embeddings else left.pop("lm_head.weight")
    names = {
        f"attn.{part}": f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    }
    names |= {f"mlp.{part}": f"mlp.{part}_proj" for part in ("up", "gate", "down")}
    names |= {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    for i in range(config.n_layers):
        for name, their_name in names.items():
            ours[f"blocks.{i}.{name}.weight"] = left.pop(f"model.layers.{i}.{their_name}.weight")
    return ours


def assert_same_logits(ours, theirs):
    assert theirs.std() > 0.5  # small ones would be the same in any model
    assert (ours - theirs).abs().max() <= LIMIT
    assert_close(ours, theirs)


# -- the same logits -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choices", MODELS)
@pytest.mark.parametrize("kernel, backend", [("eager", "explicit"), ("eager", "fused"), ("sdpa", "fused")])
@torch.no_grad()
def test_logits_of_every_length(choices, kernel, backend):
    theirs, ours = pair(choices, kernel=kernel, backend=backend)
    for n_rows, length in ((1, 1), (B, 2), (B, choices["context_length"])):
        ids = torch.randint(V, (n_rows, length))
        assert_same_logits(ours(ids), theirs(ids).logits)


def left_padded(context_length):
    """Ids (B, T) of rows of different lengths; which of them are real (B, T); and the position of each in its own row (B, T)."""
    n_pads = torch.tensor([0, context_length // 2, context_length - 1])
    column = torch.arange(context_length)
    ids = torch.randint(V, (B, context_length))
    return ids, column >= n_pads[:, None], (column - n_pads[:, None]).clamp(min=0)


@pytest.mark.parametrize("choices", MODELS)
@torch.no_grad()
def test_left_padded_rows(choices):
    theirs, ours = pair(choices)
    ids, real, positions = left_padded(choices["context_length"])
    expected = theirs(ids, attention_mask=real.long(), position_ids=positions).logits
    got = ours(ids, mask=real[:, None, None], positions=positions)
    assert_same_logits(got[real], expected[real])  # on the padding itself the two may differ, and nobody reads it


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("choices", MODELS)
@torch.no_grad()
def test_decoding_with_both_caches(choices, padded):
    theirs, ours = pair(choices)
    length = choices["context_length"]
    ids, real, positions = left_padded(length)
    if not padded:
        real, positions = torch.ones_like(real), torch.arange(length).expand(B, -1)
    cache, their_cache = ours.new_cache(B), None
    start = length // 2
    for begin, end in [(0, start), *((t, t + 1) for t in range(start, length))]:
        now = slice(begin, end)
        got = ours(ids[:, now], cache=cache, mask=real[:, None, None, :end], positions=positions[:, now])
        out = theirs(
            ids[:, now],
            past_key_values=their_cache,
            attention_mask=real[:, :end].long(),
            position_ids=positions[:, now],
            use_cache=True,
        )
        their_cache = out.past_key_values
        assert_same_logits(got[real[:, now]], out.logits[real[:, now]])
    assert cache.length == length
