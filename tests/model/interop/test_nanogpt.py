"""Checkpoints of nanoGPT: logits against GPT-2 of transformers, tokens of its character table, and what is refused."""

import os
import pickle

import pytest
import torch

from tests.foreign import T, nanogpt_model, write_meta, write_nanogpt
from tests.model.tokenizers import EOT, byte_tokenizer
from tril.model.interop.nanogpt import characters_of, find_meta, read_nanogpt

CHARACTERS = "\n !',-.:;?abcdefghijklmnopqrstuvwxyz"  # 36
WTE = "transformer.wte.weight"


def logits(model, ids):
    with torch.no_grad():
        found = model(ids)
    return found if isinstance(found, torch.Tensor) else found.logits


def test_logits_of_an_old_compiled_checkpoint_with_a_padded_vocabulary(tmp_path):
    """264 rows, of which the tokenizer uses 257, as nanoGPT pads GPT-2's 50257 tokens to 50304."""
    model = nanogpt_model(264)
    found = read_nanogpt(write_nanogpt(tmp_path / "ckpt.pt", model, old=True), (byte_tokenizer(), EOT))
    lm, ids = found.language_model(), torch.randint(264, (2, T))
    assert (logits(lm.model, ids) - logits(model, ids)).abs().max().item() <= 1e-4
    assert (found.step, lm.config.attn_dropout, lm.config.bias) == (2000, 0.25, True)
    assert (lm.config.vocab_size, lm.config.context_length, lm.n_ids, lm.eot_id) == (264, T, 257, 256)


@pytest.mark.parametrize("rows", [36, 40])
def test_characters_get_an_end_of_text_token_in_new_rows_or_in_those_that_no_character_uses(tmp_path, rows):
    model, path = nanogpt_model(rows), tmp_path / "ckpt.pt"
    write_nanogpt(path, model)
    write_meta(tmp_path / "meta.pkl", CHARACTERS)
    lm = read_nanogpt(path).language_model()
    ids = lm.encode("to be, or not\n?")
    assert ids == [CHARACTERS.index(c) for c in "to be, or not\n?"] and lm.tokenizer.decode(ids) == "to be, or not\n?"
    assert (lm.eot_id, lm.n_ids, lm.config.vocab_size) == (36, 38, max(38, rows))
    expected, found = (logits(each, torch.tensor([ids])) for each in (model, lm.model))
    assert (found[..., :rows] - expected).abs().max().item() <= 1e-4
    for new in range(rows, 38):  # the row of a new token is the mean, so is its logit
        assert (found[..., new] - expected.mean(-1)).abs().max().item() <= 1e-4
    with pytest.raises(ValueError, match="'T'"):
        lm.encode("To be")
    write_meta(tmp_path / "meta.pkl", CHARACTERS + "XYZ0123")
    with pytest.raises(ValueError, match=f"vocab_size={rows}"):
        read_nanogpt(path)


def test_the_character_table_is_found_next_to_the_file_or_in_the_data_of_nanogpt(tmp_path):
    path = tmp_path / "nano" / "out" / "ckpt.pt"
    for folder in ("nano/data/plays", "nano/out"):  # the later one goes first
        meta = write_meta(tmp_path / folder / "meta.pkl", CHARACTERS)
        assert find_meta(path, {"dataset": "plays"}) == meta
    for dataset in ("../secret", "..", "", None, 7):
        write_meta(tmp_path / "nano" / "secret" / "meta.pkl", CHARACTERS)
        with pytest.raises(ValueError, match="meta.pkl"):
            find_meta(tmp_path / "nano" / "a" / "b", {"dataset": dataset})


class Attack:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_no_file_runs_code_and_a_damaged_table_is_named(tmp_path):
    attack, meta = Attack(tmp_path / "ran"), tmp_path / "meta.pkl"
    tables = {}, {0: "a", 2: "b"}, {0: "a", 1: "a"}, {0: "a", 1: "bc"}, {0: "\ud801"}, {0: attack}, {0: "a", (1,): "b"}
    contents = [pickle.dumps(content) for content in (attack, "text", *({"itos": table} for table in tables))]
    for content in (*contents, b"", contents[0][:-3]):
        meta.write_bytes(content)
        with pytest.raises(ValueError, match="meta.pkl"):
            characters_of(meta)
    path = write_nanogpt(tmp_path / "ckpt.pt", nanogpt_model(36))
    torch.save(torch.load(path, weights_only=True) | {"config": attack}, path)
    with pytest.raises(ValueError, match="ckpt.pt"):
        read_nanogpt(path)
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(attack))  # what an unpickler that is not restricted does
    assert (tmp_path / "ran").exists()


REFUSED = [  # changes of a checkpoint of 36 characters, and a name in the message
    (lambda content: content.update(model=None), "model_args"),
    (lambda content: content["model_args"].update(n_layer=10**9), "n_layers=1000000000"),
    (lambda content: content["model"].update({WTE: torch.zeros(1).expand(10**6, 32)}), WTE),
    (lambda content: content["model"].update({"lm_head.weight": content["model"][WTE] + 1}), "lm_head.weight"),
    (lambda content: content["model"].update({WTE: 1.0}), WTE),
    (lambda content: content["model"].update({WTE: content["model"][WTE].to(torch.float8_e4m3fn)}), WTE),
    (lambda content: content["model_args"].update(bias=torch.zeros(3)), "bias of model_args"),
    (lambda content: None, "vocab_size=36"),  # the tokenizer has 257 tokens
]


@pytest.mark.parametrize(("change", "name"), REFUSED, ids=range(len(REFUSED)))
def test_a_checkpoint_that_is_no_model_is_refused_in_one_line(tmp_path, change, name):
    path = write_nanogpt(tmp_path / "ckpt.pt", nanogpt_model(36))
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)
    with pytest.raises(ValueError) as error:
        read_nanogpt(path, (byte_tokenizer(), EOT)).language_model()
    assert name in str(error.value) and "ckpt.pt" in str(error.value) and "\n" not in str(error.value)
