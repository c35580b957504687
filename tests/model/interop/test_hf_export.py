"""Folders for `transformers`: which class a model gets, what is refused, and the way out and in again."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.conftest import randomize, tiny_gpt
from tests.model.interop.folders import EOT, MODELS, byte_tokenizer, change_json, folder_of, reference
from tril.model.generation.language_model import LanguageModel
from tril.model.gpt import GPT, GPTConfig
from tril.model.interop.hf_check import difference
from tril.model.interop.hf_config import from_hf, to_hf
from tril.model.interop.hf_folder import class_name, read_hf, write_hf
from tril.model.interop.model_card import certificate, figures, model_card
from tril.scripts.common.cli import CONFIGS

GPT2 = {"pos": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True, "qk_norm": "none"}
LLAMA = {"mlp": "swiglu", "qk_norm": "none"}
QWEN3 = {"mlp": "swiglu"}
EXPORTED = {  # of tiny_gpt: class, settings
    "GPT-2": ("GPT2LMHeadModel", GPT2),
    "GPT-2, untied, relu2": ("GPT2LMHeadModel", GPT2 | {"mlp": "relu2", "tie_embeddings": False, "mlp_hidden": 20}),
    "GPT-2, relu, eps": ("GPT2LMHeadModel", GPT2 | {"mlp": "relu", "norm_eps": 0.1, "qkv_bias": True}),
    "Llama": ("LlamaForCausalLM", LLAMA),
    "Llama, grouped, biases": (
        "LlamaForCausalLM",
        LLAMA | {"n_kv_heads": 2, "head_dim": 10, "bias": True, "tie_embeddings": False, "rope_base": 50.0},
    ),
    "Qwen3, grouped": ("Qwen3ForCausalLM", QWEN3 | {"n_kv_heads": 1, "head_dim": 6, "norm_eps": 0.1}),
    "Qwen3, window": ("Qwen3ForCausalLM", QWEN3 | {"window": 5, "tie_embeddings": False}),
    "Qwen3, window of the context": ("Qwen3ForCausalLM", QWEN3 | {"window": 12}),
    "one position": ("LlamaForCausalLM", LLAMA | {"context_length": 1}),
}
REFUSED = {  # part of the message -> settings
    "model.mlp=relu2 must be swiglu": {},
    "LlamaForCausalLM cannot express the model: model.mlp=relu2": {"qk_norm": "none"},
    "model.logit_softcap=30.0 must be null": QWEN3 | {"logit_softcap": 30.0},
    "model.window=4 must be null": LLAMA | {"window": 4},
    "model.causal=false must be true": LLAMA | {"causal": False},
    "model.pos=alibi must be rope or learned": LLAMA | {"pos": "alibi"},
    "model.pos=none must be rope or learned": QWEN3 | {"pos": "none"},
    "model.qk_norm=layernorm must be none": LLAMA | {"qk_norm": "layernorm"},
    "model.qk_norm=rmsnorm must be none": GPT2 | {"qk_norm": "rmsnorm"},
    "model.norm=layernorm must be rmsnorm": LLAMA | {"norm": "layernorm"},
    "model.norm=rmsnorm must be layernorm": GPT2 | {"norm": "rmsnorm"},
    "model.bias=true must be false": QWEN3 | {"bias": True},
    "model.bias=false must be true": GPT2 | {"bias": False},
    "model.qkv_bias=true must be false": LLAMA | {"qkv_bias": True},
    "model.qkv_bias=false must be true": GPT2 | {"qkv_bias": False},
    "model.n_kv_heads=2 must be 4": GPT2 | {"n_kv_heads": 2},
    "model.head_dim=10 must be 8": GPT2 | {"head_dim": 10},
    "model.mlp=swiglu must be one of gelu, gelu_erf, relu, relu2": GPT2 | {"mlp": "swiglu"},
    "model.mlp=none must be swiglu": LLAMA | {"mlp": "none"},
    "model.n_heads=0 must be at least 1": {"mlp": "swiglu", "n_heads": 0, "qk_norm": "none"},
}


def language_model(**choices):
    return LanguageModel(tiny_gpt(vocab_size=264, **choices), byte_tokenizer(), EOT)


@pytest.mark.parametrize("name", EXPORTED)
@torch.no_grad()
def test_transformers_computes_the_same_and_the_way_back_is_exact(tmp_path, name):
    expected, choices = EXPORTED[name]
    lm = language_model(**choices)
    write_hf(tmp_path, lm)
    assert difference(tmp_path, lm) is None
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [expected] == [class_name(lm)]
    back, ids = read_hf(tmp_path), torch.randint(257, (2, lm.config.context_length))
    assert torch.equal(back.model(ids), lm.model(ids))
    assert {
        key: value
        for key, value in back.model.state_dict().items()
        if not torch.equal(value, lm.model.state_dict()[key])
    } == {}
    assert back.tokenizer.to_str() == lm.tokenizer.to_str() and back.eot == EOT


@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_wrote_is_written_again(tmp_path, name):
    folder, again = folder_of(name, tmp_path / "theirs"), tmp_path / "again"
    again.mkdir()
    lm = read_hf(folder)
    write_hf(again, lm)
    theirs, ours = (load_file(path / "model.safetensors") for path in (folder, again))
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[key], ours[key]) for key in theirs)
    assert read_hf(again).config == lm.config
    written = type(reference(name).config).from_pretrained(again)
    left = {
        "architectures",
        "dtype",
        "transformers_version",
        "use_cache",
        "attention_dropout",
        "pad_token_id",
        "initializer_range",
    }
    expected = reference(name).config.to_dict()
    got = written.to_dict()
    differs = {key for key in expected.keys() | got.keys() if expected.get(key) != got.get(key)} - left
    assert differs <= {"n_inner", "_name_or_path", "max_window_layers"}, differs


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    config = GPTConfig(**{"vocab_size": 31, "context_length": 12, "dim": 32, "n_heads": 4} | REFUSED[message])
    with pytest.raises(ValueError) as error:
        to_hf(config)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("preset", "expected"), [("gpt2", "GPT2"), ("llama", "Llama"), ("qwen3", "Qwen3")])
def test_presets_are_exported_by_construction(preset, expected):
    values = {"vocab_size": 300} | {
        key: value
        for name in ("nano", preset)
        for key, value in yaml.safe_load((CONFIGS / "model" / f"{name}.yaml").read_text()).items()
        if key != "defaults" and value is not None
    }
    [name] = to_hf(GPTConfig(**values))["architectures"]
    assert name.startswith(expected)


def test_every_field_is_written_or_refused():
    """A field of GPTConfig that changes the logits may not get lost: each one alone, changed, shows in config.json."""
    base = GPTConfig(vocab_size=31, context_length=12, dim=32, n_heads=4, mlp="swiglu", window=4)
    changed = {"vocab_size": 32, "context_length": 13, "n_layers": 5, "dim": 64, "n_heads": 2, "n_kv_heads": 2}
    changed |= {"head_dim": 10, "mlp": "relu", "mlp_ratio": 3.0, "mlp_hidden": 20, "norm": "layernorm", "norm_eps": 0.1}
    changed |= {"pos": "none", "rope_base": 50.0, "bias": True, "qkv_bias": True, "qk_norm": "none", "window": 5}
    changed |= {"tie_embeddings": False, "causal": False, "logit_softcap": 30.0}
    unseen = {"init", "backend", "checkpoint_activations", "embd_dropout", "attn_dropout", "resid_dropout"}
    assert changed.keys() | unseen == GPTConfig.__dataclass_fields__.keys()
    written = to_hf(base)
    for field, value in changed.items():
        values = base.to_dict() | {field: value} | ({"window": None} if field in ("causal", "qk_norm") else {})
        try:
            assert to_hf(GPTConfig(**values)) != written, field
        except ValueError as error:
            assert f"model.{field}=" in str(error), field


def test_the_config_of_an_export_is_the_models():
    config = GPTConfig(vocab_size=31, context_length=12, dim=32, n_heads=4, mlp="swiglu", n_kv_heads=2, window=4)
    got = from_hf(to_hf(config))
    assert got.canonical().to_dict() | {"norm_eps": None} == config.canonical().to_dict() | {
        "mlp_ratio": got.canonical().mlp_ratio
    }
    assert got.norm_eps == torch.finfo(torch.float32).eps and (got.head_dim, got.mlp_hidden) == (8, config.mlp_size)


def test_rows_without_a_token_are_never_generated(tmp_path):
    """The rows above the tokenizer's ids have the largest logits here."""
    lm = language_model(**LLAMA, tie_embeddings=False)
    with torch.no_grad():
        lm.model.head.weight[257:] *= 100
    write_hf(tmp_path, lm)
    assert difference(tmp_path, lm) is None
    change_json(tmp_path / "generation_config.json", suppress_tokens=None)
    assert "its greedy text is" in str(difference(tmp_path, lm))


def swap(a, b):
    def change(weights):
        for i in range(2):
            first, second = (f"model.layers.{i}.self_attn.{name}.weight" for name in (a, b))
            weights[first], weights[second] = weights[second].clone(), weights[first].clone()

    return change


def interleave(weights):
    """Pairs (2i, 2i + 1) of a head instead of its halves, as in the original weights of Llama."""
    for name in (name for name in weights if "q_proj" in name or "k_proj" in name):
        rows = weights[name].view(4, 2, 4, 32).transpose(1, 2)
        weights[name] = rows.reshape(32, 32).contiguous()


DIFFERENCES = {
    "q and k swapped": (swap("q_proj", "k_proj"), "its logits differ by"),
    "rotary order": (interleave, "its logits differ by"),
    "a missing tensor": (lambda w: w.pop("model.norm.weight"), "has missing_keys model.norm.weight"),
    "a tensor too many": (lambda w: w.update(score=torch.ones(1)), "has unexpected_keys score"),
    "a changed element": (lambda w: w["model.norm.weight"].view(-1)[3:4].add_(0.01), "its logits differ by"),
    "nan": (lambda w: w["model.norm.weight"].fill_(torch.nan), "its logits differ by nan"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_named(tmp_path, name):
    lm, (change, message) = language_model(**LLAMA), DIFFERENCES[name]
    write_hf(tmp_path, lm)
    weights = load_file(tmp_path / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert message in str(difference(tmp_path, lm))


def test_another_tokenizer_is_named(tmp_path):
    lm = language_model(**LLAMA)
    write_hf(tmp_path, lm)
    values = json.loads(byte_tokenizer().to_str())
    vocabulary = values["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
    assert difference(tmp_path, lm) == "its tokenizer gives other ids for the same text"
    (tmp_path / "config.json").write_text("{")
    assert str(difference(tmp_path, lm)).startswith("the folder cannot be loaded (")


def test_weights_of_another_precision_are_written_in_float32(tmp_path):
    lm = LanguageModel(
        randomize(GPT(GPTConfig(vocab_size=257, n_layers=1, dim=32, **LLAMA))).double(), byte_tokenizer(), EOT
    )
    assert {tensor.dtype for tensor in write_hf(tmp_path, lm).values()} == {torch.float32}
    assert lm.model.embed.weight.dtype == torch.float64


def test_certificate_and_card():
    import hashlib

    tensors = {"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]]).mT}
    values = certificate(tensors, {"passed": True}, {"text": "passed"})
    digest = hashlib.sha256(
        b"".join(bytes(x) for x in ([0, 0, 128, 63], [0, 0, 64, 64], [0, 0, 0, 64], [0, 0, 128, 64]))
    )
    assert values == {
        "causality": {"passed": True},
        "stored_certificate": {"text": "passed"},
        "sha256": {"a": digest.hexdigest()},
    }
    summary = {
        "steps": 40,
        "final_val_loss": 2.0,
        "final_val_bpb": 1.5,
        "best_step": 20,
        "best_val_loss": 1.0,
        "best_val_bpb": 0.5,
    }
    assert list(figures(summary, 40).values()) == [2.0, 1.5] and list(figures(summary, 20).values()) == [1.0, 0.5]
    assert figures(summary, 30) == figures(summary, None) == figures({}, 40) == {}
    options = {
        "class_name": "X",
        "entry": {"data": {"fingerprint": "f00"}},
        "summary": summary,
        "verdict": "passed | x",
    }
    card = model_card("a\nb", language_model(**LLAMA), step=20, license="mit", **options)
    lines = card.splitlines()
    assert lines[:6] == [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [tril]",
        "license: mit",
        "---",
    ]
    assert {"# a b", "| bits per byte | 0.5000 |", "| causality certificate | passed \\| x |"} <= set(lines)
    assert "In training, each text starts with the token `<|endoftext|>`, which also ends it." in lines
    card = model_card("a", language_model(**LLAMA), step=None, license=None, **options)
    assert "license:" not in card and "| license | not stated |" in card and "bits per byte" not in card
