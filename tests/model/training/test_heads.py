"""What a run records of its heads: at which steps, from which text, and that training does not change by it."""

import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.conftest import byte_model
from tests.contract.harness import metrics
from tril.model.checkpoint import read_state
from tril.model.heads.attention_maps import attention_maps
from tril.model.heads.records import (
    COPY_LOSSES,
    MAX_MAP_BYTES,
    UNIFORM,
    compress_maps,
    read_maps,
    read_records,
    thin_out,
)
from tril.model.heads.scores import SCORES
from tril.model.runs import load
from tril.model.training.callbacks.heads import HeadRecorder

QUICK = ("data.tokenizer.kind=byte", "~callbacks.samples", "~callbacks.causality", "model.resid_dropout=0.2")


def test_the_first_windows_are_scored_and_each_document_has_a_first_token(tmp_path):
    lm, ids = byte_model(attn_dropout=0.5), torch.randint(1, 256, (3, 12))
    ids[:, 5] = lm.eot_id
    model = lm.model.train()
    data = SimpleNamespace(first_val_windows=lambda n: (ids[:n], ids[:n]), tokenizer=lm.tokenizer)
    data.meta = {"eot_id": lm.eot_id}
    trainer = SimpleNamespace(is_global_zero=True, global_step=0)
    module = SimpleNamespace(model=model, document_eot=lm.eot_id, data=data)
    recorder, before = HeadRecorder(tmp_path), torch.get_rng_state()
    recorder.on_fit_start(trainer, module)
    recorder.on_train_start(trainer, module)
    assert model.training and torch.equal(torch.get_rng_state(), before)
    records, (_, codes) = read_records(tmp_path), read_maps(tmp_path)
    assert (codes[0][..., 5:, :5] == 0).all() and (codes[0][..., 5, 5] == 255).all()  # nothing of the first document
    heads = [*(f"L{layer}H{head}" for layer, head in np.ndindex(2, 4)), UNIFORM]
    assert list(records) == [(name, head) for name in (*SCORES, *COPY_LOSSES) for head in heads]
    # (L, B, H, T - 1, T) of each document: without the first position, which has no choice
    maps = [attention_maps(model, part)[:, :, :, 1:].double() for part in (ids[:2, :5], ids[:2, 5:])]
    for number, (layer, head) in enumerate(np.ndindex(2, 4)):
        each = [part[layer, :, head] for part in maps]
        nats = sum(torch.special.entr(part).sum() for part in each) / (2 * 10)
        first = torch.cat([part[..., 0].flatten() for part in each]).mean()
        assert records["entropy"].iloc[0, number] == pytest.approx(nats.item(), rel=1e-4)
        assert records["first"].iloc[0, number] == pytest.approx(first.item(), rel=1e-4)


def test_a_run_and_its_weights_are_the_same_with_and_without_records(train_tiny):
    steps = ("trainer.max_steps=5", "trainer.val_check_interval=3", "trainer.accumulate_grad_batches=2")
    settings = (*QUICK, *steps, "data.batch_size=2")
    whole = train_tiny(*settings, folder="whole").folder
    without = train_tiny(*settings, "~callbacks.heads", folder="without").folder
    first, second = (read_state(folder / "checkpoints/last.ckpt")["state_dict"] for folder in (whole, without))
    assert all(torch.equal(second[name], weight) for name, weight in first.items())
    assert metrics(whole, "train/loss") == metrics(without, "train/loss") and not (without / "heads.csv").exists()
    records, (ids, maps) = read_records(whole), read_maps(whole)
    assert list(records.index) == list(maps) == [0, 1, 2, 3, 4, 5]
    assert list(records["first"]) == ["L0H0", "L0H1", "L1H0", "L1H1", UNIFORM]
    lm = load(whole / "checkpoints/last.ckpt")
    expected = attention_maps(lm.model, torch.tensor([ids]))[:, 0].numpy()  # (L, H, T, T)
    assert np.abs((maps[5] / 255) ** 2 - expected).max() < 1 / 255 and ((maps[5] == 0) == (expected == 0)).all()


def test_small_weights_show_and_the_first_and_last_maps_stay():
    weights = np.array([0, 1e-30, 1e-7, 2**-8, 0.25, 1], np.float32)
    assert list(zlib.decompress(compress_maps(weights).tobytes())) == [0, 1, 1, 16, 128, 255]
    steps = [0, 1, 2, 4, 8, 16, 20, 30, 32, 40]
    maps = {step: np.zeros(10, np.uint8) for step in steps}
    thin_out(maps, 70)
    assert list(maps) == [0, 1, 2, 4, 8, 16, 40]
    thin_out(maps, 10)
    assert list(maps) == [0, 40] and MAX_MAP_BYTES == 2_000_000
