"""Models with random weights against GPT-2 and Qwen3 of Hugging Face `transformers`: the logits must be equal.

B batch, T queries, S keys, H query heads, G key/value heads, D head size, C width, V vocabulary.
"""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from tests.conftest import GPT2, assert_close, randomize
from tril.model.gpt import GPT, GPTConfig

B, V = 3, 61
LIMIT = 1e-4  # absolute, on logits in float32
QWEN3 = {"pos": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "qk_norm": True, "tie_embeddings": False}

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
    "other constants": {
        "n_layers": 2,
        "dim": 32,
        "n_heads": 4,
        "context_length": 17,
        "rope_base": 50.0,
        "norm_eps": 0.1,
        "mlp_hidden": 45,
    },
}
MODELS = [pytest.param(GPT2 | shape, id=f"GPT-2, {name}") for name, shape in GPT2_SHAPES.items()]
MODELS += [pytest.param(QWEN3 | shape, id=f"Qwen3, {name}") for name, shape in QWEN3_SHAPES.items()]


# --- the same model twice


def pair(choices, *, kernel="eager", backend="fused"):
    """A model of transformers with random weights, and a GPT with the same weights.

    Args:
        kernel: attention implementation of transformers.
        backend: attention backend of the GPT.
    """
    config = GPTConfig(**{**choices, "vocab_size": V, "backend": backend})
    make, convert = (
        (reference_gpt2, weights_of_gpt2) if config.pos == "learned" else (reference_qwen3, weights_of_qwen3)
    )
    reference = randomize(make(config, kernel)).eval()
    unused = dict(reference.named_parameters())  # a tied head has the name of the embedding only
    weights = convert(unused, config)  # removes what it uses
    assert not unused, f"no counterpart for {', '.join(unused)}"
    model = GPT(config).eval()
    model.load_state_dict(weights)  # strict: raises for a missing weight
    return reference, model


def reference_gpt2(config: GPTConfig, kernel: str) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.context_length,
            n_layer=config.n_layers,
            n_embd=config.dim,
            n_head=config.n_heads,
            n_inner=config.mlp_size,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation=kernel,
        )
    )


def reference_qwen3(config: GPTConfig, kernel: str) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=config.vocab_size,
            max_position_embeddings=config.context_length,
            num_hidden_layers=config.n_layers,
            hidden_size=config.dim,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_size,
            intermediate_size=config.mlp_size,
            tie_word_embeddings=config.tie_embeddings,
            rope_theta=config.rope_base,
            # torch's default, as in tril.model.norm
            rms_norm_eps=torch.finfo(torch.float32).eps if config.norm_eps is None else config.norm_eps,
            use_sliding_window=config.window is not None,
            sliding_window=config.window,
            max_window_layers=0,  # number of first layers without the window
            attn_implementation=kernel,
        )
    )


def weights_of_gpt2(unused: dict, config: GPTConfig) -> dict:
    """A state_dict of GPT from GPT-2's parameters, whose matrices are (in, out); those of nn.Linear are (out, in)."""
    state = {
        "embed.weight": unused.pop("transformer.wte.weight"),
        "pos_embed.weight": unused.pop("transformer.wpe.weight"),
    }
    state["head.weight"] = state["embed.weight"]

    def convert(reference_name, *names):  # GPT-2 concatenates the projections of q, k and v
        for kind in ("weight", "bias"):
            chunks = unused.pop(f"{reference_name}.{kind}").chunk(len(names), dim=-1)
            for name, x in zip(names, chunks, strict=True):
                state[f"{name}.{kind}"] = x.mT if x.ndim == 2 else x

    for i in range(config.n_layers):
        block, reference = f"blocks.{i}", f"transformer.h.{i}"
        convert(f"{reference}.ln_1", f"{block}.norm1")
        convert(f"{reference}.attn.c_attn", *(f"{block}.attn.{part}_proj" for part in "qkv"))  # (C, 3 C)
        convert(f"{reference}.attn.c_proj", f"{block}.attn.o_proj")
        convert(f"{reference}.ln_2", f"{block}.norm2")
        convert(f"{reference}.mlp.c_fc", f"{block}.mlp.up")
        convert(f"{reference}.mlp.c_proj", f"{block}.mlp.down")
    convert("transformer.ln_f", "norm")
    return state


def weights_of_qwen3(unused: dict, config: GPTConfig) -> dict:
    """A state_dict of GPT from Qwen3's parameters, which differ in their names only."""
    state = {"embed.weight": unused.pop("model.embed_tokens.weight"), "norm.weight": unused.pop("model.norm.weight")}
    state["head.weight"] = state["embed.weight"] if config.tie_embeddings else unused.pop("lm_head.weight")
    names = {
        f"attn.{part}": f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    }
    names |= {f"mlp.{part}": f"mlp.{part}_proj" for part in ("up", "gate", "down")}
    names |= {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    for i in range(config.n_layers):
        for name, reference_name in names.items():
            state[f"blocks.{i}.{name}.weight"] = unused.pop(f"model.layers.{i}.{reference_name}.weight")
    return state


def assert_same_logits(actual, expected):
    assert expected.std() > 0.5  # small logits would be close in any model
    assert (actual - expected).abs().max() <= LIMIT
    assert_close(actual, expected)


# --- the same logits


@pytest.mark.parametrize("choices", MODELS)
@pytest.mark.parametrize("kernel, backend", [("eager", "explicit"), ("eager", "fused"), ("sdpa", "fused")])
@torch.no_grad()
def test_logits_of_every_length(choices, kernel, backend):
    reference, model = pair(choices, kernel=kernel, backend=backend)
    for n_rows, length in ((1, 1), (B, 2), (B, choices["context_length"])):
        ids = torch.randint(V, (n_rows, length))
        assert_same_logits(model(ids), reference(ids).logits)


def left_padded(context_length):
    """Ids of rows of different lengths, which of them are not padding, and their positions in the row; (B, T) each."""
    n_pads = torch.tensor([0, context_length // 2, context_length - 1])
    column = torch.arange(context_length)
    ids = torch.randint(V, (B, context_length))
    return ids, column >= n_pads[:, None], (column - n_pads[:, None]).clamp(min=0)


@pytest.mark.parametrize("choices", MODELS)
@torch.no_grad()
def test_left_padded_rows(choices):
    reference, model = pair(choices)
    ids, real, positions = left_padded(choices["context_length"])
    expected = reference(ids, attention_mask=real.long(), position_ids=positions).logits
    got = model(ids, mask=real[:, None, None], positions=positions)
    assert_same_logits(got[real], expected[real])  # outputs at padding tokens may differ


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("choices", MODELS)
@torch.no_grad()
def test_decoding_with_both_caches(choices, padded):
    reference, model = pair(choices)
    length = choices["context_length"]
    ids, real, positions = left_padded(length)
    if not padded:
        real, positions = torch.ones_like(real), torch.arange(length).expand(B, -1)
    cache, reference_cache = model.new_cache(B), None
    start = length // 2
    for begin, end in [(0, start), *((t, t + 1) for t in range(start, length))]:
        chunk = slice(begin, end)
        got = model(ids[:, chunk], cache=cache, mask=real[:, None, None, :end], positions=positions[:, chunk])
        out = reference(
            ids[:, chunk],
            past_key_values=reference_cache,
            attention_mask=real[:, :end].long(),
            position_ids=positions[:, chunk],
            use_cache=True,
        )
        reference_cache = out.past_key_values
        assert_same_logits(got[real[:, chunk]], out.logits[real[:, chunk]])
    assert cache.length == length
