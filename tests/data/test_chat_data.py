"""A prepared chat: targets, bytes, documents and batches against the conversations themselves."""

import hashlib
import json

import numpy as np
import pytest
import torch

from tril.data import batches as windows
from tril.data.batches import IGNORE, TrainWindows, ValWindows, gather, on_device
from tril.data.config import parse
from tril.data.datamodule import TextDataModule

T = 16


def rows(n, start):
    """(question, answer) pairs; a byte is a token, é takes two."""
    return [(f"{i} times {i}?", f"é{i * i}" * (1 + i % 3)) for i in range(start, start + n)]


def chat_file(path, pairs):
    lines = [json.dumps({"prompt": question, "response": answer}) for question, answer in pairs]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def written(pairs):
    """Each conversation as bytes, None for the end-of-text token, and whether each token is a target."""
    tokens, targets = [], []
    for question, answer in pairs:
        prompt, reply = f"User: {question}\n\nAssistant:".encode(), f" {answer}".encode()
        tokens += [*prompt, *reply, None]
        targets += [False] * len(prompt) + [True] * (len(reply) + 1)
    return tokens, targets


TRAIN, VAL = rows(30, 3), rows(9, 100)


@pytest.fixture
def settings(tmp_path):
    return {
        "source": "files",
        "format": "chat",
        "path": chat_file(tmp_path / "train.jsonl", TRAIN),
        "val_path": chat_file(tmp_path / "val.jsonl", VAL),
        "batch_size": 4,
        "cache_dir": str(tmp_path / "cache"),
        "tokenizer": {"kind": "byte"},
    }


def datamodule(settings):
    config = parse(settings)
    return TextDataModule(config, context_length=T)


def test_tokens_targets_and_counts(settings):
    text = parse(settings).prepare().texts[""]
    for split, pairs in (("train", TRAIN), ("val", VAL)):
        tokens, targets = written(pairs)
        ids = text.tokens(split)
        assert np.flatnonzero(ids == text.meta["eot_id"]).tolist() == [i for i, x in enumerate(tokens) if x is None]
        assert text.tokenizer.decode(ids.tolist()) == bytes(x for x in tokens if x is not None).decode()
        assert text.targets(split).tolist() == targets
        counts = text.meta["counts"][split]
        n_bytes = sum(len(f" {answer}".encode()) for _, answer in pairs)
        assert (counts["documents"], counts["bytes"], counts["tokens"]) == (len(pairs), n_bytes, len(tokens))
        assert text.meta["targets"][split] == n_bytes + len(pairs) == sum(targets)
        opens = [0, *(i + 1 for i, x in enumerate(tokens[:-1]) if x is None)]
        assert np.flatnonzero(np.diff(text.documents(split), prepend=-1)).tolist() == opens
    sha256 = hashlib.sha256((text.folder / "flags.bin").read_bytes()).hexdigest()
    assert text.meta["files"]["flags.bin"]["sha256"] == sha256


def test_validation_bytes_and_documents_are_those_of_the_answers(settings):
    data = datamodule(settings)
    answers = [f" {answer}".encode() for _, answer in VAL]
    total = sum(map(len, answers))
    assert data.val_bytes[""](total + len(VAL)) == data.val_bytes[""](10**9) == total
    assert data.val_bytes_per_token == total / (total + len(VAL))
    two = len(answers[0]) + 1 + len(answers[1]) + 1  # with their end-of-text tokens
    assert data.val_bytes[""](two) == len(answers[0]) + len(answers[1])
    assert data.val_bytes[""](two - 1) == data.val_bytes[""](two)  # the end-of-text token has no bytes
    assert data.val_documents(two + 2).tolist() == [0] * (len(answers[0]) + 1) + [1] * (len(answers[1]) + 1) + [2, 2]
    every = [number for number, answer in enumerate(answers) for _ in range(len(answer) + 1)]
    assert data.val_documents(10**9).tolist() == every


def test_batches_have_each_target_once_and_no_other(settings):
    data = datamodule(settings)
    for split, loader in (("train", data.train_dataloader()), ("val", data.val_dataloader())):
        ids, is_target = data.texts[""].tokens(split).astype(int), data.texts[""].targets(split)
        seen = []
        n_batches = -(-loader.n_windows // loader.batch_size)
        if split == "train":  # all windows of the first epoch
            loader.batch_size = loader.n_windows
            n_batches = 1
        for _, (_, targets) in zip(range(n_batches), loader, strict=False):
            seen += targets[targets != IGNORE].tolist()
        assert sorted(seen) == sorted(ids[is_target].tolist())
    inputs, targets = next(iter(data.val_dataloader()))
    ids, is_target = data.texts[""].tokens("val").astype(int), data.texts[""].targets("val")
    assert inputs.flatten().tolist() == ids[: 4 * T].tolist()
    assert targets.flatten().tolist() == np.where(is_target, ids, IGNORE)[1 : 4 * T + 1].tolist()
    assert (data.first_val_windows(2)[1] != IGNORE).all()  # statistics of attention use every position


def test_gather_with_targets_literally():
    tokens, is_target = np.arange(100, 108, dtype=np.uint16), np.array([1, 0, 1, 1, 0, 0, 1, 1], bool)
    inputs, targets = gather(tokens, np.array([0, 2]), 3, 0, is_target)
    assert inputs.tolist() == [[100, 101, 102], [106, 100, 101]]
    assert targets.tolist() == [[IGNORE, 102, 103], [107, IGNORE, IGNORE]]
    _, targets = gather(tokens, np.array([0]), 3, 5, is_target)
    assert targets.tolist() == [[106, 107, IGNORE]]


def test_targets_that_lie_on_a_device_give_the_same_batches(monkeypatch):
    monkeypatch.setattr(windows, "COPY_TOKENS", 30)
    random = np.random.default_rng(0)
    ids, is_target = random.integers(0, 2**16, 101).astype(np.uint16), random.random(101) < 0.4
    places = [(ids, is_target), (on_device(ids, "cpu"), torch.from_numpy(is_target))]
    for kind, more in ((TrainWindows, {"seed": 4}), (ValWindows, {})):
        masks = [[mask] if kind is TrainWindows else mask for _, mask in places]
        on_host, there = (kind(ids, 7, 3, is_target=mask, **more) for (ids, _), mask in zip(places, masks, strict=True))
        for ours, theirs in zip(on_host, there, strict=True):
            assert all(map(torch.equal, ours, theirs))


def flip(path):
    content = path.read_bytes()
    path.write_bytes(content[:50] + bytes([content[50] ^ 1]) + content[51:])


DAMAGES = {
    "a bit": flip,
    "half": lambda path: path.write_bytes(path.read_bytes()[:20]),
    "deleted": lambda path: path.unlink(),
    "a byte more": lambda path: path.write_bytes(path.read_bytes() + b"\1"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_flags_are_prepared_again(settings, kind, caplog):
    text = parse(settings).prepare().texts[""]
    expected = (text.folder / "flags.bin").read_bytes()
    DAMAGES[kind](text.folder / "flags.bin")
    again = parse(settings).prepare().texts[""]
    assert (again.folder / "flags.bin").read_bytes() == expected and "flags.bin" in caplog.messages[0]


def test_other_texts_have_no_flags(settings, tmp_path):
    (tmp_path / "text.txt").write_text("some text " * 50)
    values = settings | {"path": str(tmp_path / "text.txt"), "val_path": None, "format": "text"}
    text = parse(values).prepare().texts[""]
    assert not (text.folder / "flags.bin").exists() and "targets" not in text.meta and text.targets("val") is None


def test_documents_cannot_be_masked(settings):
    with pytest.raises(ValueError, match="data.document_mask=true separates documents at end-of-text tokens"):
        parse(settings | {"document_mask": True})
