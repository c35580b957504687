"""GGUF: the tokenizer read back, and what is refused. The contract compares the tensors with those of transformers."""

import gguf
import pytest

from tests.conftest import tiny_gpt
from tests.model.interop.folders import EOT, byte_tokenizer
from tril.model.generation.language_model import LanguageModel
from tril.model.interop.gguf_file import write_gguf

LLAMA = {"mlp": "swiglu", "qk_norm": "none", "n_kv_heads": 2}


def lm_of(tokenizer=None, **choices):
    return LanguageModel(tiny_gpt(vocab_size=264, **choices), tokenizer or byte_tokenizer(), EOT)


def test_the_tokenizer(tmp_path):
    tokenizer = byte_tokenizer()
    write_gguf(tmp_path / "model.gguf", lm_of(tokenizer, **LLAMA))
    values = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "model.gguf").fields.items()}
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    assert tokens[:257] == [tokenizer.id_to_token(i) for i in range(257)] and tokens[263] == "[unused263]"
    assert types == [1] * 256 + [3] + [5] * 7  # normal, control, unused
    assert values["tokenizer.ggml.model"] == "gpt2" and values["tokenizer.ggml.pre"] == "gpt-2"
    assert values["tokenizer.ggml.bos_token_id"] == values["tokenizer.ggml.eos_token_id"] == 256
    assert values["tokenizer.ggml.add_bos_token"] is True and values["general.name"] == "model"


def test_what_is_refused_leaves_nothing(tmp_path):
    for choices, message in (({"bias": True}, "model.bias=true false"), ({"mlp": "relu2"}, "LlamaForCausalLM cannot")):
        with pytest.raises(ValueError, match=message):
            write_gguf(tmp_path / "a.gguf", lm_of(**LLAMA | choices))
    tokenizer = byte_tokenizer()
    tokenizer.pre_tokenizer = None
    with pytest.raises(ValueError, match="^GGUF needs a tokenizer that is byte-level BPE"):
        write_gguf(tmp_path / "a.gguf", lm_of(tokenizer, **LLAMA))
    assert not list(tmp_path.iterdir())
