"""Folders that `transformers` wrote: their logits, cached decoding and greedy text are those of `transformers`.

B batch, T queries, V vocabulary.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.model.interop.folders import DROP, EOT, MODELS, T, byte_tokenizer, change_json, folder_of, reference
from tril.model.interop.hf_folder import read_hf

LIMIT = 1e-4  # absolute, on logits in float32
GPT4_PATTERN = (  # of Llama 3; Qwen splits off single digits
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    return {name: folder_of(name, root / str(i)) for i, name in enumerate(MODELS)}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_of_every_length(folders, name):
    model, theirs = read_hf(folders[name]).model, reference(name)
    ids = torch.randint(256, (2, T))
    for length in range(1, T + 1):
        expected = theirs(ids[:, :length]).logits
        assert expected.std() > 0.5  # small logits would be close in any model
        assert (model(ids[:, :length]) - expected).abs().max() <= LIMIT, length


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_cached_decoding(folders, name):
    model, theirs = read_hf(folders[name]).model, reference(name)
    ids, past = torch.randint(256, (2, T)), None
    cache = model.new_cache(2)
    for begin, end in [(0, 5), *((t, t + 1) for t in range(5, T))]:
        out = theirs(ids[:, begin:end], past_key_values=past, use_cache=True)
        past = out.past_key_values
        assert (model(ids[:, begin:end], cache=cache) - out.logits).abs().max() <= LIMIT, begin


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text(folders, name):
    lm, tokenizer = read_hf(folders[name]), byte_tokenizer()
    # Of the seven rows without a token ours draws none, so theirs may not either.
    options = {"do_sample": False, "max_new_tokens": T - 4, "suppress_tokens": list(range(257, 264))}
    start = torch.tensor([tokenizer.encode("def").ids])
    generated = reference(name).generate(start, attention_mask=torch.ones_like(start), **options)
    assert lm.generate("def", T - 4, temperature=0.0) == tokenizer.decode(generated[0, 3:].tolist())


@torch.no_grad()
def test_shards(folders, tmp_path):
    name = "Llama, grouped and untied"
    folder = folder_of(name, tmp_path / "shards", max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2 and not (folder / "model.safetensors").exists()
    ids = torch.randint(256, (1, T))
    assert torch.equal(read_hf(folder).model(ids), read_hf(folders[name]).model(ids))


@torch.no_grad()
def test_names_without_prefix_and_stored_masks(tmp_path):
    """As in openai-community/gpt2, whose config.json also lacks keys that came later."""
    folder = folder_of("GPT-2", tmp_path / "gpt2")
    path = folder / "model.safetensors"
    weights = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    weights["h.0.attn.bias"] = torch.ones(1, 1, T, T).tril()
    weights["h.1.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(weights, path)
    later = (
        "tie_word_embeddings",
        "add_cross_attention",
        "scale_attn_by_inverse_layer_idx",
        "n_inner",
        "architectures",
    )
    change_json(folder / "config.json", **dict.fromkeys(later, DROP))
    ids = torch.randint(256, (1, T))
    assert (read_hf(folder).model(ids) - reference("GPT-2")(ids).logits).abs().max() <= LIMIT


@pytest.mark.parametrize("values", [{"rope_theta": 50.0}, {"rope_scaling": None, "rope_theta": 50.0}], ids=str)
@torch.no_grad()
def test_the_base_of_rope_as_version_4_writes_it(tmp_path, values):
    name = "Llama, grouped and untied"
    folder = folder_of(name, tmp_path / "old")
    change_json(folder / "config.json", rope_parameters=DROP, **values)
    ids = torch.randint(256, (1, T))
    assert (read_hf(folder).model(ids) - reference(name)(ids).logits).abs().max() <= LIMIT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_precisions_become_float32(tmp_path, dtype):
    folder = folder_of("SmolLM", tmp_path / "model")
    weights = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    got = read_hf(folder).model.embed.weight
    assert got.dtype == torch.float32 and torch.equal(got, weights["model.embed_tokens.weight"].float())


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ({"eos_token_id": 256}, EOT),
        ({"eos_token_id": [257, 256]}, "<|end|>"),
        ({"eos_token_id": None, "eos_token": "<|end|>"}, "<|end|>"),
        ({"eos_token_id": DROP, "eos_token": {"content": EOT}}, EOT),
    ],
    ids=str,
)
def test_the_end_of_text_token(tmp_path, ends, expected):
    folder = folder_of("GPT-2", tmp_path / "model")
    (folder / "tokenizer.json").write_text(byte_tokenizer("<|end|>").to_str(), encoding="utf-8")
    change_json(folder / "config.json", eos_token_id=ends["eos_token_id"])
    if "eos_token" in ends:
        change_json(folder / "tokenizer_config.json", eos_token=ends["eos_token"])
    assert read_hf(folder).eot == expected


def like(family: str) -> Tokenizer:
    """A byte-level BPE with the steps of a family's tokenizer.json, and few tokens."""
    values = json.loads(byte_tokenizer().to_str())
    if family != "GPT-2":
        values["model"]["ignore_merges"] = family == "Llama 3"
    tokenizer = Tokenizer.from_str(json.dumps(values))
    if family != "GPT-2":
        pattern = GPT4_PATTERN if family == "Llama 3" else GPT4_PATTERN.replace("{1,3}", "")
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    if family == "Qwen":
        tokenizer.normalizer = normalizers.NFC()
    if family == "Llama 3":
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{EOT} $A", special_tokens=[(EOT, 256)])
    return tokenizer


@pytest.mark.parametrize("family", ["GPT-2", "Llama 3", "Qwen"])
def test_byte_level_tokenizers(tmp_path, family):
    folder = folder_of("GPT-2", tmp_path / "model")
    tokenizer = like(family)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    text = "It's 1234 cafe\u0301s,\n\n  \u6f22 \U0001f469"
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    lm = read_hf(folder)
    assert lm.encode(text) == theirs(text, add_special_tokens=False).input_ids
    assert lm.tokenizer.decode(lm.encode(text)) == (
        "It's 1234 caf\u00e9s,\n\n  \u6f22 \U0001f469" if family == "Qwen" else text
    )
