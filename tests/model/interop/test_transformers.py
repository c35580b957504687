"""Models of `transformers`, in and out: one table of models, both ways, and what is refused in either direction."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import NANO_PARTS, tiny_gpt
from tests.foreign import DROP, MODELS, T, change_json, folder_of, reference
from tests.model.tokenizers import EOT, byte_tokenizer
from tril.model.checkpoint import Checkpoint
from tril.model.generation.config import SamplingConfig
from tril.model.generation.generate import generate_ids
from tril.model.generation.language_model import LanguageModel
from tril.model.gpt import GPTConfig
from tril.model.interop import hf
from tril.model.interop.architectures import write_config
from tril.model.interop.hf import WEIGHTS, check_equal, read_hf, write_hf

PLAIN = {"key_offset": False, "embed_skip": False, "value_embed": False}  # no class of transformers has these parts
LLAMA = {"mlp": "swiglu", "qk_norm": "none"}
GPT2 = {"pos": "learned", "norm": "layernorm", "bias": True, "qk_norm": "none", "mlp_hidden": 20}
OURS = {  # more models, of tiny_gpt
    "GPT2LMHeadModel": GPT2,
    "LlamaForCausalLM": LLAMA | {"context_length": 1, "tie_embeddings": False},
    "Qwen3ForCausalLM": {"mlp": "swiglu", "n_kv_heads": 1, "head_dim": 6, "norm_eps": 0.1, "window": 12},
}
OWN = [  # models that no class of transformers expresses
    {},
    {"pos": "alibi", "window": 5, "n_kv_heads": 2},
    {"pos": "learned", "tie_embeddings": False, "logit_softcap": 5.0},
    {"n_heads": 0, "pos": "none"},
    {"causal": False},
]
NORM = "model.layers.1.input_layernorm.weight"


def language_model(**choices):
    return LanguageModel(tiny_gpt(vocab_size=264, **PLAIN | choices), byte_tokenizer(), EOT)


@pytest.fixture
def copy_of(tmp_path):
    return lambda name: folder_of(name, tmp_path / "model")


def rewrite(folder, change):
    """Writes the weights again after `change` of the dictionary of tensors."""
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


def refused(folder, message):
    with pytest.raises((ValueError, OSError)) as raised:
        read_hf(folder).language_model()
    assert message in str(raised.value) and str(folder) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_model_of_transformers_computes_the_same_here_and_is_written_as_it_was(copy_of, tmp_path, name):
    original = copy_of(name)
    lm, theirs, ids = read_hf(original).language_model(), reference(name), torch.randint(256, (2, T))
    expected = theirs(ids).logits
    assert expected.std() > 0.5  # small logits would be close in any model
    assert (lm.model(ids) - expected).abs().max() <= 1e-4
    (out := tmp_path / "out").mkdir()
    write_hf(out, lm)
    check_equal(out, lm)
    before, after = (load_file(path / WEIGHTS) for path in (original, out))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert read_hf(out).config == lm.config
    values = [type(theirs.config).from_pretrained(path).to_dict() for path in (original, out)]
    differs = {key for key in values[0].keys() | values[1].keys() if values[0].get(key) != values[1].get(key)}
    free = {"architectures", "dtype", "transformers_version", "pad_token_id", "n_inner", "_name_or_path"}
    assert differs <= free | {"max_window_layers", "attention_dropout"}


@pytest.mark.parametrize("name", OURS)
@torch.no_grad()
def test_a_model_of_ours_is_the_same_in_transformers_and_generates_no_row_without_a_token(tmp_path, name):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lm = language_model(**OURS[name])
    lm.model.head.weight[257:] *= 100  # the rows above the tokenizer's ids have the largest logits
    write_hf(tmp_path, lm)
    check_equal(tmp_path, lm)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [name]
    back, state = read_hf(tmp_path).language_model(), lm.model.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in back.model.state_dict().items())
    assert back.tokenizer.to_str() == lm.tokenizer.to_str() and back.eot == EOT
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    start, n = torch.tensor([[lm.eot_id]]), lm.config.context_length - 1
    if n:
        ids = model.generate(start, attention_mask=torch.ones_like(start), do_sample=False, max_new_tokens=n)
        assert tokenizer.decode(ids[0, 1:], skip_special_tokens=True) == lm.generate("", n, temperature=0.0)


@pytest.mark.parametrize("choices", OWN, ids=str)
@torch.no_grad()
def test_any_other_model_runs_by_the_code_of_tril_with_cache_padding_and_beams(tmp_path, monkeypatch, choices):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (folder := tmp_path / "model").mkdir()
    lm, ids = language_model(**NANO_PARTS | choices), torch.randint(264, (3, 12))
    write_hf(folder, lm)
    check_equal(folder, lm)
    model, back = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True), read_hf(folder)
    for each in (model, back.language_model().model):
        assert torch.equal(getattr(each(ids), "logits", each(ids)), lm.model(ids))
    loss = torch.nn.functional.cross_entropy(lm.model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(model(ids, labels=ids).loss, loss)
    prompts, n, widths = [[1, 2, 3, 4], [7, 8], [9]], 6, []
    padded = torch.tensor([[256] * (4 - len(prompt)) + prompt for prompt in prompts])
    options = {"attention_mask": (padded != 256).long(), "max_new_tokens": n, "eos_token_id": None}
    model.model.embed.register_forward_hook(lambda _, args, __: widths.append(args[0].shape[1]))
    found = model.generate(padded, do_sample=False, suppress_tokens=None, **options)[:, 4:]
    expected = generate_ids(lm.model, prompts, SamplingConfig(max_new_tokens=n, temperature=0.0))
    assert torch.equal(found, torch.stack(list(expected), 1))
    assert widths == [4, *([1] * (n - 1) if lm.config.causal else range(5, 4 + n))]
    beams = [model.generate(padded, num_beams=3, do_sample=False, use_cache=x, **options) for x in (True, False)]
    assert torch.equal(*beams)


def test_a_class_expresses_every_field_of_a_model_or_not_the_model():
    """A field of GPTConfig that changes the logits may not get lost: each one alone, changed, shows in config.json."""
    base = GPTConfig(vocab_size=31, context_length=12, dim=32, n_heads=4, mlp="swiglu", window=4, **PLAIN)
    changed = {"vocab_size": 32, "context_length": 13, "n_layers": 5, "dim": 64, "n_heads": 2, "n_kv_heads": 2}
    changed |= {"head_dim": 10, "mlp": "relu", "mlp_ratio": 3.0, "mlp_hidden": 20, "norm": "layernorm", "norm_eps": 0.1}
    changed |= {"pos": "none", "rope_base": 50.0, "bias": True, "qkv_bias": True, "qk_norm": "none", "window": 5}
    changed |= {"tie_embeddings": False, "causal": False, "logit_softcap": 30.0}
    changed |= dict.fromkeys(PLAIN, True)
    unseen = {"init", "backend", "checkpoint_activations", "embd_dropout", "attn_dropout", "resid_dropout"}
    assert changed.keys() | unseen == GPTConfig.__dataclass_fields__.keys()
    for field, value in (*changed.items(), ("pos", "alibi"), ("mlp", "none"), ("qk_norm", "layernorm"), ("n_heads", 0)):
        values = base.to_dict() | {field: value} | ({"window": None} if field in ("causal", "qk_norm") else {})
        assert write_config(GPTConfig(**values)) != write_config(base), field
    for values in ({"window": 4}, {"logit_softcap": 3.0}, {"bias": False}, {"n_kv_heads": 2}, {"head_dim": 10}):
        assert write_config(GPTConfig(vocab_size=31, dim=32, n_heads=4, **PLAIN, **GPT2 | values)) is None


def swap_a_and_b(folder):
    values = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = values["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")


DIFFERENT = {
    "a weight": (lambda folder: rewrite(folder, lambda w: w[NORM].view(-1)[3:4].add_(0.01)), "logits"),
    "nan": (lambda folder: rewrite(folder, lambda w: w[NORM].fill_(torch.nan)), "logits"),
    "tokenizer": (swap_a_and_b, "tokenizer"),
}


@pytest.mark.parametrize(("change", "named"), DIFFERENT.values(), ids=DIFFERENT)
def test_an_export_that_differs_leaves_nothing(tmp_path, monkeypatch, change, named):
    lm = language_model(**LLAMA)
    checkpoint = Checkpoint(lm.config, dict(lm.model.state_dict()), lm.tokenizer.to_str(), EOT)
    monkeypatch.setattr(hf, "write_hf", lambda folder, lm: (write_hf(folder, lm), change(folder))[0])
    with pytest.raises(ValueError, match=named):
        hf.export_hf(tmp_path / "out", checkpoint)
    assert not list(tmp_path.iterdir())


@torch.no_grad()
def test_folders_of_other_versions(tmp_path, copy_of):
    """Several files; names without prefix, masks and missing keys, as openai-community/gpt2; the base of rope in v4."""
    name, ids = "Llama", torch.randint(256, (1, T))
    shards = folder_of(name, tmp_path / "shards", max_shard_size="20KB")
    for values in ({}, {"rope_parameters": DROP, "rope_scaling": None, "rope_theta": 50.0}):
        change_json(shards / "config.json", **values)
        assert (read_hf(shards).language_model().model(ids) - reference(name)(ids).logits).abs().max() <= 1e-4
    gpt2 = copy_of("GPT-2")
    expected = read_hf(gpt2).language_model().model(ids)
    weights = {key.removeprefix("transformer."): tensor for key, tensor in load_file(gpt2 / WEIGHTS).items()}
    weights |= {"h.0.attn.bias": torch.ones(1, 1, T, T).tril(), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    save_file(weights, gpt2 / WEIGHTS)
    later = "tie_word_embeddings", "add_cross_attention", "scale_attn_by_inverse_layer_idx", "n_inner", "architectures"
    change_json(gpt2 / "config.json", **dict.fromkeys(later, DROP))
    assert torch.equal(read_hf(gpt2).language_model().model(ids), expected)


def test_the_end_of_text_token(copy_of):
    folder = copy_of("GPT-2")
    (folder / "tokenizer.json").write_text(byte_tokenizer("<|end|>").to_str(), encoding="utf-8")
    for values, token, expected in (
        ([257, 256], DROP, "<|end|>"),
        (None, "<|end|>", "<|end|>"),
        (DROP, {"content": EOT}, EOT),
    ):
        change_json(folder / "config.json", eos_token_id=values)
        change_json(folder / "tokenizer_config.json", eos_token=token)
        assert read_hf(folder).eot == expected
    change_json(folder / "config.json", eos_token_id=True)
    change_json(folder / "tokenizer_config.json", eos_token=DROP)
    refused(folder, "eos_token_id")


LLAMA3 = {"rope_type": "llama3", "factor": 8.0}
TOO_MANY = byte_tokenizer(*(f"<{i}>" for i in range(8))).to_str().encode()
UNTIED = "lm_head.weight", "model.embed_tokens.weight"
REFUSED = [  # values of config.json, a change of the weights, or the content of a file, and a name in the message
    ("GPT-2", {"model_type": ["gpt2"]}, "model_type"),
    ("GPT-2", {"scale_attn_weights": False}, "scale_attn_weights=false"),
    ("GPT-2", {"n_head": "4", "n_layer": DROP}, "n_layer"),
    ("GPT-2", {"n_layer": 1}, "transformer.h.1.attn.c_attn.bias"),
    ("SmolLM", {"rope_parameters": LLAMA3}, "rope_type=llama3"),
    ("Qwen3", {"layer_types": ["full_attention"] * 2}, "layer_types"),
    ("SmolLM", lambda w: w.pop(NORM), "blocks.1.norm1.weight"),
    ("SmolLM", lambda w: w.update({NORM: w[NORM].view(4, 8)}), "blocks.1.norm1.weight"),
    ("SmolLM", lambda w: w.update({UNTIED[0]: w[UNTIED[1]] + 1}), "lm_head.weight"),
    ("SmolLM", (WEIGHTS, b"\x09" + bytes(7)), WEIGHTS),
    ("SmolLM", ("tokenizer.json", TOO_MANY), "vocab_size=264"),
    ("SmolLM", ("tokenizer.json", b"\xff"), "tokenizer.json"),
    ("SmolLM", {"eos_token_id": 10**30}, "eos_token_id"),
    ("SmolLM", ("config.json", b"[" * 100_000), "config.json"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED, ids=[f"{row[2]}-{i}" for i, row in enumerate(REFUSED)])
def test_a_folder_that_tril_cannot_express_or_read_is_refused(copy_of, name, change, message):
    folder = copy_of(name)
    if isinstance(change, dict):
        change_json(folder / "config.json", **change)
    elif isinstance(change, tuple):
        (folder / change[0]).write_bytes(change[1])
    else:
        rewrite(folder, change)
    refused(folder, message)


def test_a_head_equal_to_the_embedding_is_tied(copy_of):
    folder = copy_of("SmolLM")
    rewrite(folder, lambda w: w.update({UNTIED[0]: w[UNTIED[1]].clone()}))
    assert read_hf(folder).config.tie_embeddings
