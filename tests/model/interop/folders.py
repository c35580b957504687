"""Folders that `transformers` writes, with random weights, for the tests of their import."""

import functools
import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.model.tokenizers import byte_tokenizer
from tril.model.causality.hf import quiet

DROP = "a value that no file has"
V, T = 264, 20  # rows of the embedding, seven more than the tokenizer has ids; context
IDS = {"vocab_size": V, "eos_token_id": 256, "bos_token_id": 256}
GPT2 = IDS | {"n_positions": T, "n_layer": 2, "n_embd": 32, "n_head": 4}
EXACT = {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 50, "layer_norm_epsilon": 0.1}
MODERN = IDS | {"max_position_embeddings": T, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
MODERN |= {"intermediate_size": 44}
BIASED = {"attention_bias": True, "mlp_bias": True, "head_dim": 10, "rope_theta": 50.0, "rms_norm_eps": 0.1}
TIED = MODERN | {"num_key_value_heads": 2, "tie_word_embeddings": True}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
MODELS = {
    "GPT-2": ("gpt2", GPT2),
    "GPT-2, untied, exact gelu": ("gpt2", GPT2 | EXACT),
    "Llama": ("llama", MODERN | BIASED),
    "SmolLM": ("llama", TIED),
    "Qwen3": ("qwen3", TIED | WINDOW | {"head_dim": 6}),
}


@functools.cache
def reference(name: str):
    """A model of MODELS in which every parameter is random, biases and gains too."""
    quiet()
    kind, values = MODELS[name]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    return model


def folder_of(name: str, folder: Path, **options) -> Path:
    """Writes a model of MODELS and a tokenizer; options are those of save_pretrained."""
    reference(name).save_pretrained(folder, **options)
    (folder / "tokenizer.json").write_text(byte_tokenizer().to_str(), encoding="utf-8")
    return folder


def change_json(path: Path, **values) -> None:
    """Replaces values of a JSON file; the value DROP removes the key."""
    content = {} if not path.exists() else json.loads(path.read_text(encoding="utf-8"))
    content = {key: value for key, value in (content | values).items() if value != DROP}
    path.write_text(json.dumps(content), encoding="utf-8")
