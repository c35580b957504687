"""Models of `transformers`, in and out: one table of models, both ways, and what is refused in either direction."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch
import yaml
from jinja2 import Environment
from safetensors.torch import load_file, save_file
from tokenizers import Regex, normalizers, pre_tokenizers, processors

from tests.calls import call
from tests.conftest import tiny_gpt
from tests.model.interop.folders import DROP, EOT, MODELS, T, byte_tokenizer, change_json, folder_of, reference
from tril.model.causality.model import ModelError
from tril.model.checkpoint import Checkpoint
from tril.model.generation.language_model import LanguageModel
from tril.model.gpt import GPTConfig
from tril.model.interop.architectures import from_hf, to_hf
from tril.model.interop.hf_check import difference
from tril.model.interop.hf_folder import WEIGHTS, chat_template, read_hf, stored_certificate, write_hf
from tril.model.interop.model_card import CERTIFICATE, figures, model_card, sha256_of
from tril.scripts.certify import main as certify
from tril.scripts.cli.compose import CONFIGS

GPT2 = {"pos": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True, "qk_norm": "none"}
LLAMA = {"mlp": "swiglu", "qk_norm": "none"}
OURS = {  # more models, of tiny_gpt
    "GPT2LMHeadModel": GPT2 | {"mlp": "relu2", "tie_embeddings": False, "mlp_hidden": 20, "qkv_bias": True},
    "LlamaForCausalLM": LLAMA | {"context_length": 1},
    "Qwen3ForCausalLM": {"mlp": "swiglu", "n_kv_heads": 1, "head_dim": 6, "norm_eps": 0.1, "window": 12},
}
GPT4_PATTERN = (  # of Llama 3; Qwen splits off single digits
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def language_model(**choices):
    return LanguageModel(tiny_gpt(vocab_size=264, **choices), byte_tokenizer(), EOT)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    root = tmp_path_factory.mktemp("originals")
    return {name: folder_of(name, root / str(i)) for i, name in enumerate(MODELS)}


@pytest.fixture
def copy_of(originals, tmp_path):
    def copy(name):
        (tmp_path / "model").mkdir()
        for path in originals[name].iterdir():
            (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
        return tmp_path / "model"

    return copy


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_model_of_transformers_computes_the_same_here_and_is_written_as_it_was(originals, tmp_path, name):
    lm, theirs, ids = read_hf(originals[name]), reference(name), torch.randint(256, (2, T))
    for length in (1, 7, T):
        expected = theirs(ids[:, :length]).logits
        assert expected.std() > 0.5  # small logits would be close in any model
        assert (lm.model(ids[:, :length]) - expected).abs().max() <= 1e-4
    write_hf(tmp_path, lm)
    assert difference(tmp_path, lm) is None  # in logits and greedy text, as transformers loads it
    before, after = (load_file(path / WEIGHTS) for path in (originals[name], tmp_path))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert read_hf(tmp_path).config == lm.config
    values = [type(theirs.config).from_pretrained(path).to_dict() for path in (originals[name], tmp_path)]
    differs = {key for key in values[0].keys() | values[1].keys() if values[0].get(key) != values[1].get(key)}
    free = {"architectures", "dtype", "transformers_version", "pad_token_id", "n_inner", "_name_or_path"}
    assert differs <= free | {"max_window_layers", "attention_dropout"}


@pytest.mark.parametrize("name", OURS)
@torch.no_grad()
def test_a_model_of_ours_is_the_same_in_transformers_and_comes_back(tmp_path, name):
    lm = language_model(**OURS[name])
    write_hf(tmp_path, lm)
    assert difference(tmp_path, lm) is None
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [name]
    back, state = read_hf(tmp_path), lm.model.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in back.model.state_dict().items())
    assert back.tokenizer.to_str() == lm.tokenizer.to_str() and back.eot == EOT


@pytest.mark.parametrize(("preset", "expected"), [("gpt2", "GPT2"), ("llama", "Llama"), ("qwen3", "Qwen3")])
def test_presets_are_exported_by_construction(preset, expected):
    values = yaml.safe_load((CONFIGS / "model" / f"{preset}.yaml").read_text())
    names = GPTConfig.__dataclass_fields__.keys() & values.keys()
    values = {"vocab_size": 300} | {name: values[name] for name in names if values[name] is not None}
    assert to_hf(GPTConfig(**values))["architectures"][0].startswith(expected)


def test_every_field_is_written_or_refused():
    """A field of GPTConfig that changes the logits may not get lost: each one alone, changed, shows in config.json."""
    base = GPTConfig(vocab_size=31, context_length=12, dim=32, n_heads=4, mlp="swiglu", window=4)
    changed = {"vocab_size": 32, "context_length": 13, "n_layers": 5, "dim": 64, "n_heads": 2, "n_kv_heads": 2}
    changed |= {"head_dim": 10, "mlp": "relu", "mlp_ratio": 3.0, "mlp_hidden": 20, "norm": "layernorm", "norm_eps": 0.1}
    changed |= {"pos": "none", "rope_base": 50.0, "bias": True, "qkv_bias": True, "qk_norm": "none", "window": 5}
    changed |= {"tie_embeddings": False, "causal": False, "logit_softcap": 30.0}
    unseen = {"init", "backend", "checkpoint_activations", "embd_dropout", "attn_dropout", "resid_dropout"}
    assert changed.keys() | unseen == GPTConfig.__dataclass_fields__.keys()
    for field, value in (*changed.items(), ("pos", "alibi"), ("mlp", "none"), ("qk_norm", "layernorm")):
        values = base.to_dict() | {field: value} | ({"window": None} if field in ("causal", "qk_norm") else {})
        try:
            assert to_hf(GPTConfig(**values)) != to_hf(base), field
        except ValueError as error:
            assert f"model.{field}={value}".lower() in str(error) and " must be " in str(error)
    for values in ({"window": 4}, {"logit_softcap": 3.0}, {"bias": False}, {"n_kv_heads": 2}, {"head_dim": 10}):
        with pytest.raises(ValueError, match=f"GPT2LMHeadModel cannot express the model: model.{min(values)}="):
            to_hf(GPTConfig(vocab_size=31, dim=32, n_heads=4, **GPT2 | values))
    got = from_hf(to_hf(base))
    assert (got.norm_eps, got.head_dim, got.mlp_hidden) == (torch.finfo(torch.float32).eps, 8, base.mlp_size)


def test_rows_without_a_token_are_never_generated(tmp_path):
    """The rows above the tokenizer's ids have the largest logits here."""
    lm = language_model(**LLAMA, tie_embeddings=False)
    with torch.no_grad():
        lm.model.head.weight[257:] *= 100
    write_hf(tmp_path, lm)
    assert difference(tmp_path, lm) is None
    change_json(tmp_path / "generation_config.json", suppress_tokens=None)
    assert "its greedy text is" in str(difference(tmp_path, lm))


def interleave(weights):
    """Pairs (2i, 2i + 1) of a head instead of its halves, as in the original weights of Llama."""
    for name in (name for name in weights if "q_proj" in name or "k_proj" in name):
        rows = weights[name].view(4, 2, 4, 32).transpose(1, 2)
        weights[name] = rows.reshape(32, 32).contiguous()


def swap_values(weights):
    first, second = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qk")
    weights[first], weights[second] = weights[second].clone(), weights[first].clone()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap_values, "its logits differ by"),
        (interleave, "its logits differ by"),
        (lambda w: w.pop("model.norm.weight"), "has missing_keys model.norm.weight"),
        (lambda w: w.update(score=torch.ones(1)), "has unexpected_keys score"),
        (lambda w: w["model.norm.weight"].view(-1)[3:4].add_(0.01), "its logits differ by"),
        (lambda w: w["model.norm.weight"].fill_(torch.nan), "its logits differ by nan"),
    ],
)
def test_a_difference_is_named(tmp_path, change, message):
    lm = language_model(**LLAMA)
    write_hf(tmp_path, lm)
    rewrite(tmp_path, change)
    assert message in str(difference(tmp_path, lm))


def rewrite(folder, change):
    """Writes the weights again after `change` of the dictionary of tensors."""
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


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


@torch.no_grad()
def test_folders_of_other_versions(originals, tmp_path, copy_of):
    """Several files; names without prefix, masks and missing keys, as openai-community/gpt2; the base of rope in v4."""
    name, ids = "Llama, grouped and untied", torch.randint(256, (1, T))
    expected = read_hf(originals[name]).model(ids)
    shards = folder_of(name, tmp_path / "shards", max_shard_size="20KB")
    assert len(list(shards.glob("model-*.safetensors"))) > 2 and torch.equal(read_hf(shards).model(ids), expected)
    change_json(shards / "config.json", rope_parameters=DROP, rope_scaling=None, rope_theta=50.0)
    assert torch.equal(read_hf(shards).model(ids), expected)
    gpt2 = copy_of("GPT-2")
    weights = {key.removeprefix("transformer."): tensor for key, tensor in load_file(gpt2 / WEIGHTS).items()}
    weights |= {"h.0.attn.bias": torch.ones(1, 1, T, T).tril(), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    save_file(weights, gpt2 / WEIGHTS)
    later = "tie_word_embeddings", "add_cross_attention", "scale_attn_by_inverse_layer_idx", "n_inner", "architectures"
    change_json(gpt2 / "config.json", **dict.fromkeys(later, DROP))
    assert torch.equal(read_hf(gpt2).model(ids), read_hf(originals["GPT-2"]).model(ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_precisions_become_float32(copy_of, tmp_path, dtype):
    folder = copy_of("SmolLM")
    rewrite(folder, lambda w: w.update({name: tensor.to(dtype) for name, tensor in w.items()}))
    lm, name = read_hf(folder), "model.embed_tokens.weight"
    assert lm.model.embed.weight.dtype == torch.float32
    assert torch.equal(lm.model.embed.weight, load_file(folder / WEIGHTS)[name].float())
    lm.model.to(dtype)
    assert {tensor.dtype for tensor in write_hf(tmp_path, lm).values()} == {torch.float32}


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ({"eos_token_id": [257, 256]}, "<|end|>"),
        ({"eos_token_id": None, "eos_token": "<|end|>"}, "<|end|>"),
        ({"eos_token_id": DROP, "eos_token": {"content": EOT}}, EOT),
        *(({"eos_token_id": x}, None) for x in (263, -1, None, "<end>", True)),
    ],
    ids=str,
)
def test_the_end_of_text_token(copy_of, ends, expected):
    folder = copy_of("GPT-2")
    (folder / "tokenizer.json").write_text(byte_tokenizer("<|end|>").to_str(), encoding="utf-8")
    change_json(folder / "config.json", eos_token_id=ends["eos_token_id"])
    if "eos_token" in ends:
        change_json(folder / "tokenizer_config.json", eos_token=ends["eos_token"])
    if expected is None:
        refused(folder, "no end-of-text token: set eos_token_id in config.json")
    else:
        assert read_hf(folder).eot == expected


@pytest.mark.parametrize("family", ["Llama 3", "Qwen"])
def test_byte_level_tokenizers(copy_of, family):
    """With the steps of a family's tokenizer.json, and few tokens."""
    from transformers import PreTrainedTokenizerFast

    folder, tokenizer = copy_of("GPT-2"), byte_tokenizer()
    pattern = GPT4_PATTERN if family == "Llama 3" else GPT4_PATTERN.replace("{1,3}", "")
    steps = pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    if family == "Qwen":
        tokenizer.normalizer = normalizers.NFC()
    else:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{EOT} $A", special_tokens=[(EOT, 256)])
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    text = "It's 1234 cafe\u0301s,\n\n  \u6f22 \U0001f469"
    theirs, lm = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json")), read_hf(folder)
    assert lm.encode(text) == theirs(text, add_special_tokens=False).input_ids
    assert lm.tokenizer.decode(lm.encode(text)) == (text.replace("e\u0301", "\u00e9") if family == "Qwen" else text)


REFUSED = [  # model, changed values of config.json, part of the message
    ("GPT-2", {"model_type": "mamba"}, "model_type=mamba must be one of gpt2, llama, qwen3"),
    ("GPT-2", {"model_type": ["gpt2"]}, "must be one of gpt2"),
    ("GPT-2", {"scale_attn_weights": False}, "scale_attn_weights=false must be true"),
    ("GPT-2", {"activation_function": ["gelu"]}, "activation_function="),
    ("GPT-2", {"n_head": "4", "n_layer": DROP}, "n_layer is missing"),
    ("GPT-2", {"n_head": "4"}, "model.n_heads='4'"),
    ("GPT-2", {"n_layer": 3}, "its tensors have "),
    ("GPT-2", {"n_layer": 1}, "transformer.h.1.attn.c_attn.bias does not belong to the model and 11 more"),
    ("GPT-2", {"n_layer": 10**12}, "n_layers=1000000000000"),
    ("GPT-2", {"n_positions": 10**11}, "its tensors have "),
    ("GPT-2", {"n_inner": 100}, "its tensors have "),
    ("GPT-2", {"tie_word_embeddings": False}, "its tensors have "),
    ("GPT-2", {"auto_map": {"AutoModel": "evil.Model"}}, "auto_map="),
    ("SmolLM", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_type=llama3 must be default"),
    ("SmolLM", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "type=linear must be default"),
    ("SmolLM", {"rope_scaling": "yarn"}, "rope_scaling=yarn must be null or an object"),
    ("SmolLM", {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 1.0}}, "rope_theta=5.0 must be that of rope_para"),
    ("SmolLM", {"attention_bias": True}, "attention_bias=true must be false"),
    ("SmolLM", {"hidden_act": "gelu"}, "hidden_act=gelu must be one of silu"),
    ("SmolLM", {"vocab_size": 10**14}, "its tensors have "),
    ("Qwen3", {"attention_bias": True}, "attention_bias=true must be false"),
    ("Qwen3", {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}, "in all layers"),
    ("Qwen3", {"head_dim": DROP}, "its tensors have "),  # the default of the class
]


def refused(folder, message, error=ValueError):
    with pytest.raises(error) as raised:
        read_hf(folder)
    assert message in str(raised.value) and str(folder) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(("name", "values", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_config_that_gpt_does_not_express(copy_of, name, values, message):
    folder = copy_of(name)
    change_json(folder / "config.json", **values)
    refused(folder, message)


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(NORM), "its tensors have "),
        (lambda w: w.update(score=torch.ones(1)), "score does not belong to the model"),
        (lambda w: w.update({"model.layers.0.mlp.up_proj.bias": torch.ones(44)}), "its tensors have "),
        (lambda w: w.update({NORM: w[NORM].view(4, 8)}), "size mismatch for blocks.1.norm1.weight"),
        (lambda w: w.update({NORM: torch.tensor(1.0)}), "its tensors have "),
        (
            lambda w: w.update({NORM: torch.ones(32, dtype=torch.int32)}),
            "blocks.1.norm1.weight is no floating-point tensor",
        ),
        (lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"] + 1}), "differs from the embedding"),
        (lambda w: w.clear(), "its tensors have "),
    ],
)
def test_weights_of_another_model(copy_of, change, message):
    folder = copy_of("SmolLM")
    rewrite(folder, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    assert read_hf(folder).config.tie_embeddings  # a head equal to the embedding is accepted
    rewrite(folder, change)
    refused(folder, message)


def test_damaged_and_missing_files(copy_of, tmp_path):
    folder = copy_of("SmolLM")
    content, header_end = (folder / WEIGHTS).read_bytes(), 8
    header_end += int.from_bytes(content[:8], "little")
    header = json.loads(content[8:header_end])
    header[NORM] |= {"shape": [2**40], "data_offsets": [0, 2**42]}
    text = json.dumps(header).encode()
    for damaged in (len(text).to_bytes(8, "little") + text + content[header_end:], content[:-100], content[:4], b""):
        (folder / WEIGHTS).write_bytes(damaged)
        refused(folder, "cannot be read", OSError)
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    refused(folder, "has its weights in pytorch_model.bin, a pickle, which can run any code")
    (folder / "pytorch_model.bin").unlink()
    refused(folder, "has no model.safetensors.index.json", FileNotFoundError)
    for name, broken in (("tokenizer.json", b"{}"), ("tokenizer.json", b"\xff"), ("config.json", b"[1]")):
        (folder / name).write_bytes(broken)
        refused(folder, "cannot be read" if broken == b"{}" else "is not UTF-8" if broken == b"\xff" else "not list")
    for broken in (b"{", b"[" * 100_000, b"\xff"):
        (folder / "config.json").write_bytes(broken)
        refused(folder, "is not JSON")
    for name in ("tokenizer.json", "config.json"):
        (folder / name).unlink()
    refused(folder, "has no config.json", FileNotFoundError)
    refused(tmp_path / "nowhere", "is not a folder", FileNotFoundError)


def test_files_that_do_not_match_their_index(tmp_path):
    folder = folder_of("SmolLM", tmp_path / "model", max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())["weight_map"]
    name, files = max(content), sorted(set(content.values()))
    (folder / files[1]).rename(folder / "kept")
    refused(folder, f"lacks 1 of its {len(files)} files with weights, the first is {files[1]}", FileNotFoundError)
    (folder / "kept").rename(folder / files[1])
    other = next(file for file in files if file != content[name])
    for places, message in (
        (content | {name: "../outside.safetensors"}, "which is no name in this folder"),
        (content | {name: other}, f"does not say where {name} is"),
        ({}, "has no weight_map"),
        ({key: file for key, file in content.items() if file != files[1]}, "its tensors"),
    ):
        change_json(index, weight_map=places)
        refused(folder, message)


def test_a_tokenizer_with_more_tokens_or_of_another_library(copy_of):
    folder = copy_of("GPT-2")
    extra = byte_tokenizer(*(f"<{i}>" for i in range(8)))
    (folder / "tokenizer.json").write_text(extra.to_str(), encoding="utf-8")
    refused(folder, "the tokenizer's 265 tokens exceed the model's vocab_size=264")
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    refused(folder, "has only a SentencePiece tokenizer, tokenizer.model")


def test_the_chat_template_with_its_special_tokens(tmp_path):
    text, settings = "{{ bos_token }}{{ messages }}{{ eos_token }}", tmp_path / "tokenizer_config.json"
    assert chat_template(tmp_path) is None
    special = {"bos_token": '<"é', "eos_token": {"content": "<e>"}, "unk_token": None}
    several = [{"name": "tools", "template": "x"}, {"name": "default", "template": text}]
    for template in (text, several):
        change_json(settings, **special, chat_template=template)
        assert Environment().from_string(chat_template(tmp_path)).render(messages="-") == '<"é-<e>'
    change_json(settings, bos_token=DROP, chat_template=7)
    with pytest.raises(ValueError, match=r"tokenizer_config.json: chat_template must be text, not int"):
        chat_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert chat_template(tmp_path) == '{% set eos_token = "<e>" %}from the file'
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat_template.jinja is not UTF-8"):
        chat_template(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    for none in (None, []):
        change_json(settings, chat_template=none)
        assert chat_template(tmp_path) is None


def broken(*_, **__):
    raise ModelError("the model is not called in this test")


def test_the_stored_certificate_belongs_until_a_weight_changes(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    assert stored_certificate(tmp_path) is None
    folder.mkdir()
    content = {"causality": {"passed": True}, "sha256": sha256_of(write_hf(folder, language_model(**LLAMA)))}
    weights = load_file(folder / WEIGHTS)
    digests = {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in weights.items()}
    assert content["sha256"] == digests == sha256_of({name: x.double() for name, x in weights.items()})
    (folder / CERTIFICATE).write_text(json.dumps(content))
    assert stored_certificate(folder) == {"text": "passed; belongs to these weights", "belongs": True, "passed": True}
    rewrite(folder, lambda w: w["model.norm.weight"].view(-1)[-1:].add_(1e-3))
    text = "passed; does not belong to these weights: 1 tensors differ, the first is model.norm.weight"
    assert stored_certificate(folder) == {"text": text, "belongs": False, "passed": True}
    monkeypatch.setattr("tril.model.causality.certificate.certify_model", broken)
    done = call(certify, f"hf={folder}", f"out={tmp_path / 'out'}", cwd=tmp_path)
    assert done.stdout.startswith(f"stored certificate: {text}") and done.returncode == 3
    for values, text in (({"causality": None}, "none"), ({"causality": {"passed": 1}}, "none that can be read")):
        (folder / CERTIFICATE).write_text(json.dumps(values))
        assert stored_certificate(folder) == {"text": text, "belongs": False, "passed": None}


def test_the_model_card():
    summary = {"steps": 40, "final_val_loss": 2.0, "final_val_bpb": 1.5}
    summary |= {"best_step": 20, "best_val_loss": 1.0, "best_val_bpb": 0.5}
    assert list(figures(summary, 40).values()) == [2.0, 1.5] and list(figures(summary, 20).values()) == [1.0, 0.5]
    assert figures(summary, 30) == figures(summary, None) == figures({}, 40) == {}
    lm, options = language_model(**LLAMA), {"summary": summary, "verdict": "passed | x"}
    stored = Checkpoint(lm.config, {}, "", EOT, {"fingerprint": "f00"}, step=20)
    card = model_card("a\nb", lm, checkpoint=stored, license="mit", **options)
    header, lines = yaml.safe_load(card.split("---")[1]), card.splitlines()
    expected = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["tril"], "license": "mit"}
    assert header == expected and {"# a b", "| bits per byte | 0.5000 |"} <= set(lines)
    assert {"| causality certificate | passed \\| x |", "| class | LlamaForCausalLM |"} <= set(lines)
    assert "In training, each text starts with the token `<|endoftext|>`, which also ends it." in lines
    card = model_card("a", lm, checkpoint=replace(stored, step=None), license=None, **options)
    assert "license:" not in card and "| license | not stated |" in card and "bits per byte" not in card
