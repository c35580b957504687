"""A loaded checkpoint computes the same logits and text, and a file that does not match is refused in one line."""

import hashlib
import json
import os
import sys

import pytest
import torch

from tests.conftest import tiny_gpt
from tests.model.generation.test_language_model import byte_level
from tril.model.checkpoint import load, payload, read, save, write
from tril.model.generation.language_model import EOT, LanguageModel

PARTS = [
    {},
    {"pos": "learned", "norm": "layernorm", "bias": True, "mlp": "gelu", "tie_embeddings": True},
    {"pos": "none", "n_kv_heads": 2},
    {"pos": "alibi", "qkv_bias": True, "qk_norm": "layernorm", "norm_eps": 1e-3, "mlp_hidden": 50},
    {"rope_base": 500.0, "qk_norm": "none"},
    {"tie_embeddings": True, "mlp": "swiglu", "window": 4, "logit_softcap": 9.0},
]


def language_model(**parts):
    return LanguageModel(tiny_gpt(**{"vocab_size": 257, **parts}), byte_level())


@pytest.fixture
def saved(tmp_path):
    save(tmp_path / "run" / "some.ckpt", language_model(), name="test")
    return tmp_path / "run" / "some.ckpt"


def rewrite(path, change):
    content = torch.load(path, weights_only=True)
    change(content)
    write(path, content)


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_what_is_loaded_computes_the_same(parts, tmp_path):
    lm, ids = language_model(**parts), torch.randint(257, (2, 12))
    save(tmp_path / "a.ckpt", lm)
    loaded = load(tmp_path / "a.ckpt")
    assert loaded.config == lm.config and loaded.eot == lm.eot and loaded.tokenizer.to_str() == lm.tokenizer.to_str()
    assert torch.equal(loaded.model(ids), lm.model(ids))
    assert loaded.generate("é", seed=1) == lm.generate("é", seed=1)
    assert not any(module.training for module in loaded.model.modules())
    assert all(p.requires_grad and p.is_leaf for p in loaded.model.parameters())
    assert loaded.model.n_parameters() == lm.model.n_parameters()  # a tied head is still tied


def test_the_format(saved):
    torch.manual_seed(0)
    content, lm = torch.load(saved, weights_only=True), language_model()
    assert content.keys() == {"state_dict", "tril", "checksums"}
    assert content["checksums"].keys() == {"tensors", "rest"}
    assert content["checksums"]["tensors"] == {
        f"state_dict/model.{name}": hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        for name, tensor in lm.model.state_dict().items()
    }
    assert content["state_dict"].keys() == {f"model.{name}" for name in lm.model.state_dict()}
    entry = content["tril"]
    assert entry.keys() == {"format", "config", "tokenizer", "eot", "data", "versions"}
    assert entry == payload(lm.model, lm.tokenizer, EOT, {"name": "test"})
    assert json.loads(json.dumps(entry)) == entry  # plain values only
    assert {type(x) for x in entry["versions"].values()} == {str}  # torch.__version__ is a subclass of str


def test_entries_of_lightning_are_ignored(saved):
    before = load(saved).generate("a")
    rewrite(
        saved,
        lambda content: content.update(
            epoch=1, optimizer_states=[{"state": {0: torch.ones(3)}}], loops={}, callbacks={}
        ),
    )
    assert load(saved).generate("a") == before


def test_loading_does_not_use_the_global_generator(saved):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load(saved)
    assert torch.equal(torch.rand(3), expected)


def test_a_loaded_model_no_longer_needs_its_file(saved):
    lm, ids = load(saved), torch.randint(257, (1, 12))
    before = lm.model(ids)
    saved.write_bytes(bytes(saved.stat().st_size))  # in place, as a copy over it would
    assert torch.equal(lm.model(ids), before)


def test_weights_of_another_precision_are_converted(saved):
    expected = {name: tensor.bfloat16().float() for name, tensor in torch.load(saved)["state_dict"].items()}
    rewrite(
        saved,
        lambda content: content.update(state_dict={name: t.bfloat16() for name, t in content["state_dict"].items()}),
    )
    for name, tensor in load(saved).model.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, expected[f"model.{name}"])


def test_saving_writes_the_whole_file_or_nothing(saved, monkeypatch):
    before = saved.read_bytes()

    def fail_half_way(content, file):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail_half_way)
    with pytest.raises(OSError, match="disk full"):
        save(saved, language_model())
    assert saved.read_bytes() == before and os.listdir(saved.parent) == [saved.name]


def test_a_run_folder_and_latest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for age, run in enumerate(["outputs/new", "multirun/2/old"]):
        file = tmp_path / run / "checkpoints" / "last.ckpt"
        save(file, language_model(context_length=10 + age))
        os.utime(file, (1e9 - age, 1e9 - age))
    assert load("multirun/2/old").config.context_length == 11
    assert load().config.context_length == 10
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load("nowhere")


def refused(path, message):
    with pytest.raises(ValueError, match=message) as error:
        load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content", [b"", b"words", b"PK\x03\x04 words", b"\x80\x02words"], ids=["empty", "text", "zip", "pickle"]
)
def test_files_that_are_not_checkpoints(content, tmp_path):
    (tmp_path / "a.ckpt").write_bytes(content)
    refused(tmp_path / "a.ckpt", "is not a checkpoint, or is truncated")


@pytest.mark.parametrize("share", [0.01, 0.5, 0.999])
def test_truncated_files(share, saved):
    whole = saved.read_bytes()
    saved.write_bytes(whole[: int(share * len(whole))])
    refused(saved, "is not a checkpoint, or is truncated")


def test_code_is_never_run(tmp_path):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "attacked"),)

    torch.save({"state_dict": {}, "tril": Attack()}, tmp_path / "a.ckpt")
    refused(tmp_path / "a.ckpt", "is not a checkpoint")
    assert not (tmp_path / "attacked").exists()


def change_state(**tensors):
    def change(content):
        for name, tensor in tensors.items():
            name = name.replace("__", ".")
            content["state_dict"].pop(name, None)
            if tensor is not None:
                content["state_dict"][name] = tensor

    return change


def change_entry(**values):
    return lambda content: content["tril"].update(values)


def change_config(**values):
    return lambda content: content["tril"]["config"].update(values)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda content: content.pop("tril"),
            "has no state_dict and tril entries; use a .ckpt file that train.py wrote",
        ),
        (lambda content: content.pop("state_dict"), "has no state_dict and tril entries"),
        (lambda content: content.update(tril=3), "has no state_dict and tril entries"),
        (change_entry(format=3), "has format 3; this version of Tril reads 1 to 2; use the version that wrote it"),
        (lambda content: content["tril"].pop("format"), "has format None"),
        (
            lambda content: [content["tril"].pop(key) for key in ("tokenizer", "eot")],
            "has no tokenizer, eot in its tril entry",
        ),
        (change_entry(tokenizer="{}"), "its tokenizer cannot be read"),
        (change_entry(eot="</s>"), "the tokenizer has no token '</s>'"),
        (
            change_config(depth=1, alpha=2),
            "its config has the unknown alpha, depth, so a newer version of Tril wrote it",
        ),
        (change_config(n_heads=5), "model.n_heads=5 must divide model.dim=32"),
        (change_config(vocab_size="many"), "model.vocab_size='many' must be a valid integer"),
        (lambda content: content["tril"]["config"].pop("vocab_size"), "model.vocab_size is missing"),
        (change_config(tie_embeddings=None), "model.tie_embeddings=null"),
        (
            change_state(model__norm__weight=None),
            r"its tensors do not match its config \(model.norm.weight is missing\); it is damaged, use another file",
        ),
        (
            change_state(model__extra=torch.ones(2), other=torch.ones(1)),
            "model.extra does not belong to the model; other does not belong to the model",
        ),
        (change_state(model__norm__weight=torch.ones(7)), r"model.norm.weight has shape \(7,\), and needs \(32,\)"),
        (change_state(model__norm__weight="text"), "model.norm.weight is of type str"),
        (change_config(n_layers=1), "its config has n_layers=1, and its tensors have 2"),
        (
            change_state(model__norm__weight=None, model__extra=torch.ones(2)),
            "model.norm.weight is missing; model.extra does not belong to the model",
        ),
    ],
)
def test_mismatches_are_refused(change, message, saved):
    rewrite(saved, change)
    refused(saved, message)


def test_a_tokenizer_larger_than_the_model(saved):
    tokenizer = byte_level(300).to_str()
    rewrite(saved, change_entry(tokenizer=tokenizer))
    refused(saved, "the tokenizer's 300 tokens exceed the model's vocab_size=257")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_reading_does_not_copy_the_weights(saved):
    """Lightning's checkpoints contain the optimizer state too, which sampling should not read."""
    tensors = [*read(saved)["state_dict"].values()]
    maps = [
        range(*(int(x, 16) for x in line.split()[0].split("-")))
        for line in open("/proc/self/maps")
        if line.rstrip().endswith(str(saved))
    ]
    assert maps and all(any(t.data_ptr() in m for m in maps) for t in tensors)
