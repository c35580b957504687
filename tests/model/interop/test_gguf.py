"""GGUF: the file read back, its logits by llama.cpp's formulas, and what is refused."""

import gguf
import pytest
import torch
import torch.nn.functional as F

from tests.conftest import randomize, tiny_gpt
from tests.model.interop.folders import EOT, byte_tokenizer
from tril.model.generation.language_model import LanguageModel
from tril.model.interop.gguf_file import write_gguf

LLAMA = {"mlp": "swiglu", "qk_norm": "none", "n_kv_heads": 2, "norm_eps": 0.01, "rope_base": 50.0}
MODELS = {
    "llama": LLAMA,
    "llama, untied": LLAMA | {"tie_embeddings": False, "head_dim": 6},
    "qwen3": LLAMA | {"qk_norm": "rmsnorm", "head_dim": 12},
}


def lm_of(tokenizer=None, **choices):
    model = randomize(tiny_gpt(**{"vocab_size": 264} | choices)).eval()
    return LanguageModel(model, tokenizer or byte_tokenizer(), EOT)


def read(path):
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    return {name: field.contents() for name, field in reader.fields.items()}, tensors


def llama_cpp(values, w, ids):
    """Logits (T, V) of ids (T,) by the formulas of llama.cpp: neighbors are rotated in llama, halves in qwen3."""
    kind = values["general.architecture"]
    heads, kv_heads, size, eps, base, layers = (
        values[f"{kind}.{key}"]
        for key in (
            *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
            *("attention.layer_norm_rms_epsilon", "rope.freq_base", "block_count"),
        )
    )
    angles = torch.arange(len(ids))[:, None] * base ** (-torch.arange(0, size, 2) / size)  # (T, D/2)
    pairs = {"llama": (slice(0, None, 2), slice(1, None, 2)), "qwen3": (slice(0, size // 2), slice(size // 2, None))}

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w[f"{name}.weight"]

    def rotated(x):  # (H, T, D)
        first, second = (x[..., part] for part in pairs[kind])
        out = torch.empty_like(x)
        out[..., pairs[kind][0]] = first * angles.cos() - second * angles.sin()
        out[..., pairs[kind][1]] = first * angles.sin() + second * angles.cos()
        return out

    x = w["token_embd.weight"][ids]
    for block in (f"blk.{i}" for i in range(layers)):
        y = norm(x, f"{block}.attn_norm")
        q, k, v = (
            (y @ w[f"{block}.attn_{name}.weight"].T).unflatten(1, (n, size)).transpose(0, 1)
            for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if kind == "qwen3":
            q, k = norm(q, f"{block}.attn_q_norm"), norm(k, f"{block}.attn_k_norm")
        k, v = (z.repeat_interleave(heads // kv_heads, 0) for z in (rotated(k), v))
        scores = rotated(q) @ k.mT / size**0.5
        scores = scores.masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), -torch.inf)
        x = x + (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ w[f"{block}.attn_output.weight"].T
        y = norm(x, f"{block}.ffn_norm")
        y = F.silu(y @ w[f"{block}.ffn_gate.weight"].T) * (y @ w[f"{block}.ffn_up.weight"].T)
        x = x + y @ w[f"{block}.ffn_down.weight"].T
    return norm(x, "output_norm") @ w.get("output.weight", w["token_embd.weight"]).T


@pytest.mark.parametrize("name", MODELS)
def test_the_file_gives_the_same_logits(name, tmp_path):
    lm = lm_of(**MODELS[name])
    write_gguf(tmp_path / "model.gguf", lm)
    values, tensors = read(tmp_path / "model.gguf")
    assert values["general.architecture"] == name.partition(",")[0] and values["general.name"] == "model"
    assert ("output.weight" in tensors) == (name == "llama, untied")
    ids = torch.randint(257, (lm.config.context_length,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(llama_cpp(values, tensors, ids), lm.model(ids[None])[0], atol=1e-4, rtol=1e-4)


def test_the_tokenizer(tmp_path):
    tokenizer = byte_tokenizer()
    lm = lm_of(tokenizer, **LLAMA)
    write_gguf(tmp_path / "model.gguf", lm)
    values, _ = read(tmp_path / "model.gguf")
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    assert tokens[:257] == [tokenizer.id_to_token(i) for i in range(257)] and tokens[263] == "[unused263]"
    assert types == [1] * 256 + [3] + [5] * 7  # normal, control, unused
    assert values["tokenizer.ggml.model"] == "gpt2" and values["tokenizer.ggml.pre"] == "gpt-2"
    assert values["tokenizer.ggml.bos_token_id"] == values["tokenizer.ggml.eos_token_id"] == 256
    assert values["tokenizer.ggml.add_bos_token"] is True


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"bias": True}, "model.bias=true false"),
        ({"qk_norm": "rmsnorm", "window": 5}, "model.window=5 null"),
        ({"mlp": "relu2"}, "LlamaForCausalLM cannot express the model: model.mlp=relu2 must be swiglu"),
    ],
)
def test_what_is_refused_leaves_nothing(tmp_path, choices, message):
    with pytest.raises(ValueError, match=message):
        write_gguf(tmp_path / "a.gguf", lm_of(**LLAMA | choices))
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_of_characters_is_refused(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.pre_tokenizer = None
    with pytest.raises(ValueError, match="^GGUF needs a tokenizer that is byte-level BPE"):
        write_gguf(tmp_path / "a.gguf", lm_of(tokenizer, **LLAMA))
