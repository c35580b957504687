"""Models with ALiBi against BLOOM and MPT of Hugging Face `transformers`, both with random weights: equal logits.

B batch, T queries, H heads, D head size, C width, V vocabulary.
"""

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, MptConfig, MptForCausalLM

from tests.conftest import assert_close, randomize
from tests.model.test_transformers_parity import B, V, left_padded
from tril.model.gpt import GPT, GPTConfig

LIMIT = 1e-5  # absolute, on logits in float32
COMMON = {"vocab_size": V, "pos": "alibi", "norm": "layernorm", "norm_eps": 1e-5, "qk_norm": "none"}


def bloom(n_heads: int) -> tuple[BloomForCausalLM, GPT]:
    """BLOOM's slopes follow the authors' rule for every number of heads.

    BLOOM normalizes the embedding once more. That depends on the token only, so the rows of the table do it here, and
    the head, which has the table without it, is not tied.
    """
    size = {"n_layers": 2, "dim": 4 * n_heads, "n_heads": n_heads}
    config = BloomConfig(
        vocab_size=V, hidden_size=size["dim"], n_layer=2, n_head=n_heads, layer_norm_epsilon=COMMON["norm_eps"]
    )
    reference = randomize(BloomForCausalLM(config)).eval()
    unused = dict(reference.named_parameters())

    def take(name: str) -> dict[str, torch.Tensor]:
        return {kind: unused.pop(f"transformer.{name}.{kind}") for kind in ("weight", "bias")}

    with torch.no_grad():
        table = unused.pop("transformer.word_embeddings.weight")
        state = {"head.weight": table, "embed.weight": reference.transformer.word_embeddings_layernorm(table)}
    take("word_embeddings_layernorm")
    parts = {"norm": take("ln_f")}
    names = {"norm1": "input_layernorm", "attn.o_proj": "self_attention.dense", "norm2": "post_attention_layernorm"}
    names |= {"mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h"}
    for i in range(2):
        parts |= {f"blocks.{i}.{own}": take(f"h.{i}.{name}") for own, name in names.items()}
        for kind, x in take(f"h.{i}.self_attention.query_key_value").items():
            for part, rows in zip("qkv", x.unflatten(0, (n_heads, 3, -1)).unbind(1), strict=True):
                parts.setdefault(f"blocks.{i}.attn.{part}_proj", {})[kind] = rows.flatten(0, 1)  # (H * D, ...)
    state |= {f"{name}.{kind}": x for name, tensors in parts.items() for kind, x in tensors.items()}
    assert not unused, f"no counterpart for {', '.join(unused)}"
    model = GPT(GPTConfig(**COMMON, **size, bias=True, mlp="gelu", tie_embeddings=False))
    model.load_state_dict(state)
    return reference, model.eval()


def mpt(n_heads: int) -> tuple[MptForCausalLM, GPT]:
    """MPT has no biases and a tied head. Where H is a power of 2, its slopes are those of the paper."""
    size = {"n_layers": 3, "dim": 4 * n_heads, "n_heads": n_heads}
    config = MptConfig(vocab_size=V, d_model=size["dim"], n_layers=3, n_heads=n_heads, max_seq_len=64)
    reference = randomize(MptForCausalLM(config)).eval()
    unused = {name.removeprefix("transformer."): x for name, x in reference.named_parameters()}
    state = {"embed.weight": unused.pop("wte.weight"), "norm.weight": unused.pop("norm_f.weight")}
    state["head.weight"] = state["embed.weight"]
    names = {"norm1": "norm_1", "norm2": "norm_2", "attn.o_proj": "attn.out_proj"}
    names |= {"mlp.up": "ffn.up_proj", "mlp.down": "ffn.down_proj"}
    for i in range(3):
        for own, name in names.items():
            state[f"blocks.{i}.{own}.weight"] = unused.pop(f"blocks.{i}.{name}.weight")
        for part, rows in zip("qkv", unused.pop(f"blocks.{i}.attn.Wqkv.weight").chunk(3), strict=True):
            state[f"blocks.{i}.attn.{part}_proj.weight"] = rows
    assert not unused, f"no counterpart for {', '.join(unused)}"
    model = GPT(GPTConfig(**COMMON, **size, mlp="gelu_erf"))
    model.load_state_dict(state)
    return reference, model.eval()


PAIRS = [pytest.param(bloom, 8, id="BLOOM-8"), pytest.param(bloom, 12, id="BLOOM-12"), pytest.param(mpt, 8, id="MPT-8")]
LENGTH = 17


def assert_same_logits(actual, expected):
    assert expected.std() > 0.5  # small logits would be close in any model
    assert (actual - expected).abs().max() <= LIMIT
    assert_close(actual, expected)


@pytest.mark.parametrize("backend", ["explicit", "fused"])
@pytest.mark.parametrize("make, n_heads", PAIRS)
@torch.no_grad()
def test_logits_of_every_length(make, n_heads, backend):
    reference, model = make(n_heads)
    for block in model.blocks:
        block.attn.backend = backend
    for n_rows, length in ((1, 1), (B, 2), (B, LENGTH), (1, 60)):
        ids = torch.randint(V, (n_rows, length))
        assert_same_logits(model(ids), reference(ids).logits)


@pytest.mark.parametrize("make, n_heads", PAIRS)
@torch.no_grad()
def test_left_padded_rows(make, n_heads):
    reference, model = make(n_heads)
    ids, real, _ = left_padded(LENGTH)
    expected = reference(ids, attention_mask=real.long()).logits
    assert_same_logits(model(ids, mask=real[:, None, None])[real], expected[real])


@pytest.mark.parametrize("make, n_heads", PAIRS)
@torch.no_grad()
def test_decoding_left_padded_rows_with_both_caches(make, n_heads):
    reference, model = make(n_heads)
    ids, real, _ = left_padded(LENGTH)
    cache, past, start = model.new_cache(B), None, LENGTH // 2
    for begin, end in [(0, start), *((t, t + 1) for t in range(start, LENGTH))]:
        got = model(ids[:, begin:end], cache=cache, mask=real[:, None, None, :end])
        out = reference(ids[:, begin:end], past_key_values=past, attention_mask=real[:, :end].long(), use_cache=True)
        past = out.past_key_values
        assert_same_logits(got[real[:, begin:end]], out.logits[real[:, begin:end]])
