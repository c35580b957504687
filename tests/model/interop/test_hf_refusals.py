"""Folders that cannot be imported, each refused in one line."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.interop.folders import DROP, byte_tokenizer, change_json, folder_of
from tril.model.interop.hf_folder import read_hf
from tril.model.interop.hf_weights import stored_tensors

LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}
LAYER_TYPES = ["full_attention", "sliding_attention"]
CONFIGS = [  # model, changed values of config.json, part of the message
    ("GPT-2", {"model_type": "mamba"}, "model_type=mamba must be one of gpt2, llama, qwen3"),
    ("GPT-2", {"model_type": DROP}, "model_type=null must be one of"),
    ("GPT-2", {"model_type": ["gpt2"]}, "must be one of gpt2"),
    ("GPT-2", {"scale_attn_weights": False}, "scale_attn_weights=false must be true"),
    ("GPT-2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=true must be false"),
    ("GPT-2", {"add_cross_attention": True}, "add_cross_attention=true must be false"),
    ("GPT-2", {"activation_function": "swish"}, "activation_function=swish must be one of gelu_new, gelu, relu"),
    ("GPT-2", {"activation_function": ["gelu"]}, "activation_function="),
    ("GPT-2", {"n_head": 5}, "model.n_heads=5 must divide model.dim=32"),
    ("GPT-2", {"n_head": "4"}, "model.n_heads='4'"),
    ("GPT-2", {"n_layer": DROP}, "n_layer is missing"),
    ("GPT-2", {"n_layer": 3}, "n_layer=3, and the weights have 2 layers"),
    ("GPT-2", {"n_layer": 10**12}, "model.n_layers=1000000000000 must be"),
    ("GPT-2", {"n_positions": 10**11}, "100000000000 positions exceed the limit"),
    ("GPT-2", {"n_inner": 100}, "mlp.c_fc.weight has shape (32, 128), and needs (32, 100)"),
    ("GPT-2", {"tie_word_embeddings": False}, "lm_head.weight is missing"),
    ("GPT-2", {"auto_map": {"AutoModel": "evil.Model"}}, "auto_map="),
    ("GPT-2", {"quantization_config": {"bits": 4}}, "quantization_config="),
    ("SmolLM", {"rope_parameters": LLAMA3_ROPE}, "rope_parameters.rope_type=llama3 must be default"),
    ("SmolLM", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type=linear must be default"),
    ("SmolLM", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 must be 1.0"),
    ("SmolLM", {"rope_scaling": "yarn"}, "rope_scaling=yarn must be null or an object"),
    (
        "SmolLM",
        {"rope_theta": 50.0, "rope_parameters": {"rope_theta": 1.0}},
        "rope_theta=50.0 must be that of rope_parameters, 1.0",
    ),
    ("SmolLM", {"attention_bias": True}, "attention_bias=true, mlp_bias=false must be equal"),
    ("SmolLM", {"hidden_act": "gelu"}, "hidden_act=gelu must be silu"),
    ("SmolLM", {"pretraining_tp": 2}, "pretraining_tp=2 must be 1"),
    ("SmolLM", {"num_key_value_heads": 4}, "k_proj.weight has shape (16, 32), and needs (32, 32)"),
    ("SmolLM", {"vocab_size": 10**14}, "model.embed_tokens.weight has shape"),
    ("SmolLM", {"hidden_size": "wide"}, "model.dim='wide'"),
    ("Qwen3", {"attention_bias": True}, "attention_bias=true must be false"),
    (
        "Qwen3",
        {"use_sliding_window": True, "layer_types": LAYER_TYPES},
        "sliding_window must be in all layers or in none",
    ),
    (
        "Qwen3",
        {"use_sliding_window": True, "layer_types": DROP, "max_window_layers": 1},
        "sliding_window must be in all",
    ),
    ("Qwen3", {"head_dim": 15}, "must be even"),
    ("Qwen3", {"head_dim": DROP}, "has shape (64, 32), and needs (512, 32)"),  # 128 by default
]


def refused(folder, message, error=ValueError):
    with pytest.raises(error) as raised:
        read_hf(folder)
    text = str(raised.value)
    assert message in text and str(folder) in text and "\n" not in text, text
    return text


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    root = tmp_path_factory.mktemp("originals")
    return {name: folder_of(name, root / name) for name in ("GPT-2", "SmolLM", "Qwen3")}


@pytest.fixture
def copy_of(originals, tmp_path):
    def copy(name):
        folder = tmp_path / "model"
        folder.mkdir()
        for path in originals[name].iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        return folder

    return copy


@pytest.mark.parametrize(("name", "values", "message"), CONFIGS, ids=lambda value: str(value)[:40])
def test_config(copy_of, name, values, message):
    folder = copy_of(name)
    change_json(folder / "config.json", **values)
    refused(folder, message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "must be a JSON object, not list"),
        ("[" * 100_000, "is not JSON"),
        ("\udcff", "is not JSON"),
    ],
    ids=["truncated", "list", "nested", "no UTF-8"],
)
def test_unreadable_json(copy_of, content, message):
    folder = copy_of("GPT-2")
    (folder / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    refused(folder, message)


def test_missing_files(copy_of, tmp_path):
    refused(tmp_path / "nowhere", "is not a folder", FileNotFoundError)
    folder = copy_of("GPT-2")
    for name, message in (
        ("tokenizer.json", "has no tokenizer.json"),
        ("model.safetensors", "has no model.safetensors and no model.safetensors.index.json"),
        ("config.json", "has no config.json"),
    ):
        (folder / name).unlink()
        refused(folder, message, FileNotFoundError)


def test_pickles_are_not_loaded(copy_of):
    folder = copy_of("GPT-2")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    text = refused(folder, "has its weights in pytorch_model.bin, a pickle, which can run any code")
    assert "save it again with save_pretrained" in text


def test_sentencepiece_is_named(copy_of):
    folder = copy_of("SmolLM")
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    refused(folder, "has only a SentencePiece tokenizer, tokenizer.model")


def test_tokenizers(copy_of):
    folder = copy_of("GPT-2")
    path = folder / "tokenizer.json"
    path.write_text(byte_tokenizer(*(f"<{i}>" for i in range(8))).to_str(), encoding="utf-8")
    refused(folder, "the tokenizer's 265 tokens exceed the model's vocab_size=264")
    path.write_text("{}", encoding="utf-8")
    refused(folder, "its tokenizer cannot be read")
    path.write_bytes(b"\xff")
    refused(folder, "is not UTF-8")
    path.write_text(byte_tokenizer().to_str(), encoding="utf-8")
    for eot in (263, -1, None, "<end>", True):
        change_json(folder / "config.json", eos_token_id=eot)
        refused(folder, "no end-of-text token: set eos_token_id in config.json")


def rewrite(folder, change):
    """Writes the weights again after `change` of the dictionary of tensors."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


NORM = "model.layers.1.input_layernorm.weight"
WEIGHTS = {
    "missing": (lambda w: w.pop(NORM), f"{NORM} is missing"),
    "too many": (lambda w: w.update(score=torch.ones(1)), "score does not belong to the model"),
    "a bias": (
        lambda w: w.update({"model.layers.0.mlp.up_proj.bias": torch.ones(44)}),
        "model.layers.0.mlp.up_proj.bias does not belong to the model",
    ),
    "shape": (lambda w: w.update({NORM: torch.ones(31)}), f"{NORM} has shape (31,), and needs (32,)"),
    "scalar": (lambda w: w.update({NORM: torch.tensor(1.0)}), f"{NORM} has shape (), and needs (32,)"),
    "integers": (
        lambda w: w.update({NORM: torch.ones(32, dtype=torch.int32)}),
        f"{NORM} is I32, and must be one of F16",
    ),
    "another head": (
        lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"] + 1}),
        "tie_word_embeddings=true, and lm_head.weight differs from the embedding",
    ),
    "all": (lambda w: w.clear(), "and the weights have 0 layers"),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights(copy_of, name):
    folder, (change, message) = copy_of("SmolLM"), WEIGHTS[name]
    rewrite(folder, change)
    refused(folder, message)


def test_a_head_equal_to_the_embedding_is_accepted(copy_of):
    folder = copy_of("SmolLM")
    rewrite(folder, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    assert read_hf(folder).config.tie_embeddings


def test_a_header_that_promises_more_than_the_file(copy_of):
    folder = copy_of("SmolLM")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header[NORM] |= {"shape": [2**40], "data_offsets": [0, 2**42]}
    text = json.dumps(header).encode()
    for damaged in (len(text).to_bytes(8, "little") + text + content[8 + size :], content[:-100], content[:4], b""):
        path.write_bytes(damaged)
        refused(folder, "cannot be read", OSError)


def test_shards(tmp_path):
    folder = folder_of("SmolLM", tmp_path / "model", max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    files = sorted(set(content["weight_map"].values()))
    (folder / files[1]).rename(folder / "kept")
    refused(folder, f"lacks 1 of its {len(files)} files with weights, the first is {files[1]}", FileNotFoundError)
    (folder / "kept").rename(folder / files[1])
    name = next(name for name, file in content["weight_map"].items() if file == files[1])
    for values, message in (
        ({"weight_map": content["weight_map"] | {name: "../outside.safetensors"}}, "which is no name in this folder"),
        ({"weight_map": content["weight_map"] | {name: files[0]}}, f"{files[0]} has no {name}"),
        ({"weight_map": {}}, "has no weight_map"),
        ({"weight_map": {key: file for key, file in content["weight_map"].items() if file != files[1]}}, "is missing"),
    ):
        change_json(index, **values)
        refused(folder, message)


def test_tensors_of_every_layer_are_listed_once():
    from tests.conftest import tiny_gpt

    model = tiny_gpt(mlp="swiglu", tie_embeddings=False)
    stored = stored_tensors("qwen3", model.config)
    names = [name for tensor in stored.values() for name in tensor.ours]
    assert sorted(names) == sorted(model.state_dict()) and len(stored) == len(names)
