"""Checkpoints of nanoGPT: logits against GPT-2 of transformers, tokens of its character table, and what is refused."""

import os
import pickle
import shutil

import pytest
import torch

from tests.model.interop.folders import byte_tokenizer
from tests.model.interop.nanogpt_files import T, reference, write_checkpoint, write_meta
from tril.model.interop.nanogpt import characters_of, read_nanogpt

CHARACTERS = "\n !',-.:;?abcdefghijklmnopqrstuvwxyz"  # 36


def logits(model, ids):
    with torch.no_grad():
        found = model(ids)
    return found if isinstance(found, torch.Tensor) else found.logits


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"old": True}], ids=["biases", "no biases", "old, compiled"])
def test_logits_of_a_padded_vocabulary(tmp_path, options):
    """264 rows, of which the tokenizer uses 257, as nanoGPT pads GPT-2's 50257 tokens to 50304."""
    model = reference(264, bias=options.get("bias", True))
    found = read_nanogpt(write_checkpoint(tmp_path / "ckpt.pt", model, **options))
    assert (found.meta, found.step) == (None, 2000)
    lm = found.language_model(byte_tokenizer())
    ids = torch.randint(264, (2, T))
    for length in (1, 7, T):
        error = (logits(lm.model, ids[:, :length]) - logits(model, ids[:, :length])).abs().max().item()
        assert error <= 1e-4
    config = lm.config
    assert (config.mlp, config.attn_dropout, config.bias) == ("gelu_erf", 0.25, options.get("bias", True))
    assert (config.vocab_size, config.context_length, lm.n_ids, lm.eot_id) == (264, T, 257, 256)
    assert lm.model.training is False and lm.generate("ab", 5) == lm.generate("ab", 5)


def test_characters_get_an_end_of_text_token(tmp_path):
    model = reference(len(CHARACTERS))
    path = write_checkpoint(tmp_path / "ckpt.pt", model)
    write_meta(tmp_path / "meta.pkl", CHARACTERS)
    lm = read_nanogpt(path).language_model()
    ids = lm.encode("to be, or not\n?")
    assert ids == [CHARACTERS.index(c) for c in "to be, or not\n?"] and lm.tokenizer.decode(ids) == "to be, or not\n?"
    assert (lm.eot_id, lm.n_ids, lm.config.vocab_size) == (36, 38, 38)
    expected = logits(model, torch.tensor([ids]))
    found = logits(lm.model, torch.tensor([ids]))
    assert (found[..., :36] - expected).abs().max().item() <= 1e-4
    for new in (36, 37):  # the row of a new token is the mean, so is its logit
        assert (found[..., new] - expected.mean(-1)).abs().max().item() <= 1e-4
    with pytest.raises(ValueError, match="'T', which the tokenizer does not know"):
        lm.encode("To be")


def test_rows_that_no_character_uses_hold_the_new_tokens(tmp_path):
    model = reference(40)
    path = write_checkpoint(tmp_path / "ckpt.pt", model)
    write_meta(tmp_path / "meta.pkl", CHARACTERS)
    lm = read_nanogpt(path).language_model()
    assert (lm.eot_id, lm.n_ids, lm.config.vocab_size) == (36, 38, 40)
    ids = torch.randint(40, (2, T))
    assert (logits(lm.model, ids) - logits(model, ids)).abs().max().item() <= 1e-4


def test_the_character_table_is_found_in_the_data_of_nanogpt(tmp_path, monkeypatch):
    path = write_checkpoint(tmp_path / "nano" / "out" / "ckpt.pt", reference(36), dataset="plays")
    assert read_nanogpt(path).meta is None
    there = write_meta(tmp_path / "nano" / "data" / "plays" / "meta.pkl", CHARACTERS)
    assert read_nanogpt(path).meta == there
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    shutil.move(tmp_path / "nano" / "data", "data")
    assert read_nanogpt(path).meta == tmp_path / "work" / "data" / "plays" / "meta.pkl"
    write_meta(path.parent / "meta.pkl", CHARACTERS)
    assert read_nanogpt(path).meta == path.parent / "meta.pkl"


@pytest.mark.parametrize("dataset", ["../secret", "..", "", None, 7])
def test_the_data_set_is_a_name(tmp_path, dataset):
    (tmp_path / "nano" / "data").mkdir(parents=True)
    for folder in ("data", "secret", ".", "data/secret"):
        write_meta(tmp_path / folder / "meta.pkl", CHARACTERS)
    path = write_checkpoint(tmp_path / "nano" / "out" / "ckpt.pt", reference(36), dataset=dataset)
    write_meta(tmp_path / "nano" / "meta.pkl", CHARACTERS)
    assert read_nanogpt(path).meta is None


class Attack:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_no_file_runs_code(tmp_path):
    attack = Attack(tmp_path / "ran")
    meta = tmp_path / "meta.pkl"
    for content in (attack, {"itos": {0: attack}}, {"itos": {0: "a"}, "stoi": attack}):
        meta.write_bytes(pickle.dumps(content))
        with pytest.raises(ValueError, match="meta.pkl cannot be read .it refers to .*mkdir, which no character table"):
            characters_of(meta)
    path = write_checkpoint(tmp_path / "ckpt.pt", reference(36), changes={"config": attack})
    with pytest.raises(ValueError, match="ckpt.pt is not a checkpoint"):
        read_nanogpt(path)
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(attack))  # what an unpickler that is not restricted does
    assert (tmp_path / "ran").exists()


TABLES = [
    ("text", "has no table itos"),
    ({"itos": {}}, "has no table itos"),
    ({"itos": {0: "a", 2: "b"}}, "has no table itos"),
    ({"itos": {0: "a", 1: "a"}}, "has no table itos"),
    ({"itos": {0: "a", 1: "bc"}}, "has no table itos"),
    ({"itos": {0: "a", "1": "b"}}, "has no table itos"),
    ({"itos": ["a", "b"]}, "has no table itos"),
    ({"itos": {0: "a", 1: "\ud801"}}, "has no table itos"),
]


@pytest.mark.parametrize(("content", "message"), TABLES, ids=str)
def test_tables_that_are_none(tmp_path, content, message):
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match=message):
        characters_of(tmp_path / "meta.pkl")


def test_files_that_are_no_pickle(tmp_path):
    for content in (b"", b"text", pickle.dumps({"itos": {0: "a"}})[:-3]):
        (tmp_path / "meta.pkl").write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read"):
            characters_of(tmp_path / "meta.pkl")


def damaged(name):
    """Changes of a checkpoint of 36 characters, and the message."""
    weights = write_state()
    wte = "transformer.wte.weight"
    changes = {
        "no model": ({"model": None}, "has no model and model_args"),
        "no sizes": ({"model_args": {"n_layer": 2}}, "model_args has no vocab_size, block_size, n_embd, n_head"),
        "head": ({"model": weights | {"lm_head.weight": weights[wte] + 1}}, "lm_head.weight differs"),
        "missing": ({"model": {k: v for k, v in weights.items() if k != wte}}, "transformer.wte.weight is missing"),
        "extra": ({"model": weights | {"transformer.more": torch.ones(2)}}, "transformer.more does not belong"),
        "layers": ({"model_args": arguments(n_layer=10**9)}, "model.n_layers=1000000000 must be"),
        "width": ({"model_args": arguments(n_embd=64)}, "has shape"),
        "heads": ({"model_args": arguments(n_head=5)}, "n_heads=5"),
        "bias": ({"model_args": arguments(bias="yes")}, "bias=yes, which must be True or False"),
        "no tensor": ({"model": weights | {wte: 1.0}}, "transformer.wte.weight is no tensor"),
        "huge": ({"model": weights | {wte: torch.zeros(1).expand(10**9, 10**9)}}, "bytes, more than the"),
        "integers": (
            {"model": weights | {"transformer.ln_f.bias": torch.zeros(32, dtype=torch.int64)}},
            "norm.bias is no float",
        ),
    }
    return changes[name]


def arguments(**changes):
    return {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": T, "vocab_size": 36, "bias": True} | changes


def write_state():
    model = reference(36)
    return {
        name: tensor.T.contiguous() if ".c_" in name and name.endswith("weight") else tensor
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }


NAMES = [
    *("no model", "no sizes", "head", "missing", "extra", "layers", "width", "heads", "bias", "no tensor", "huge"),
    "integers",
]


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_that_are_refused(tmp_path, name):
    changes, message = damaged(name)
    path = write_checkpoint(tmp_path / "ckpt.pt", reference(36), changes=changes)
    with pytest.raises(ValueError, match=message) as error:
        read_nanogpt(path).language_model(byte_tokenizer())
    assert "ckpt.pt" in str(error.value) and "\n" not in str(error.value)


def test_a_tokenizer_of_another_model(tmp_path):
    path = write_checkpoint(tmp_path / "ckpt.pt", reference(36))
    with pytest.raises(ValueError, match="the tokenizer's 257 tokens exceed the model's vocab_size=36"):
        read_nanogpt(path).language_model(byte_tokenizer())
    write_meta(tmp_path / "meta.pkl", CHARACTERS + "XYZ")
    with pytest.raises(ValueError, match="has 39 characters and exceeds the vocab_size=36"):
        read_nanogpt(path).language_model()
