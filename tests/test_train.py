"""train.py end to end on a tiny text."""

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from tests.runs import DRAWN_BY, TINY, command_line, interrupted, rows, train_typed, typed
from tril.model.checkpoint import load
from tril.model.training.summary import plot_losses
from tril.scripts.cli.errors import UserError


def final_loss(settings):
    return train_typed(settings).summary["final_val_loss"]


def test_the_files_of_a_run(configure, tmp_path, monkeypatch):
    config = configure()
    monkeypatch.setattr(DRAWN_BY, plot_losses)
    run = train_typed(config)
    folder, summary = tmp_path / "run", run.summary
    assert run.folder == folder and summary["final_val_loss"] < math.log(300)
    assert summary["steps"] == 8 and summary["tokens"] == 8 * 4 * 32
    assert summary["parameters"] == load(folder).model.n_parameters()
    assert Image.open(folder / "loss.png").width == 900
    assert (folder / "samples.txt").read_text(encoding="utf-8").count("--- sample at step") == 2
    assert (folder / "config.yaml").exists()
    certificate = torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True)["tril"]["certificate"]
    assert certificate["passed"] and certificate["certified_at_step"] == 8 and len(certificate.pop("of")) == 64
    assert certificate == {key: json.loads((folder / "causality.json").read_text())[key] for key in certificate}
    assert summary["causality"] == "certified"
    logged = rows(folder)
    assert [int(row["step"]) for row in logged if row["train/loss"]] == [2, 4, 6, 8]
    assert [float(row["val/loss"]) for row in logged if row["val/loss"]][-1] == pytest.approx(summary["final_val_loss"])
    for column in ("val/loss", "heads/entropy/L1H1", "heads/first/L0H0"):
        assert [int(row["step"]) for row in logged if row[column]] == [4, 8]
    windows = np.load(folder / "windows_last.npz")
    assert windows["nll"].sum() / windows["targets"].sum() == pytest.approx(summary["final_val_loss"], rel=1e-6)


def test_documents_in_a_window_do_not_attend_to_each_other_also_after_resuming(configure, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"the square of {i} is {i * i}."}) + "\n" for i in range(600)))
    masked = ["data.document_mask=true", f"data.path={rows}"]
    loss = final_loss(configure(*masked))
    assert loss != final_loss(configure(f"data.path={rows}", folder="unmasked"))

    lm, [cache] = (
        load(tmp_path / "run" / "checkpoints" / "last.ckpt"),
        (tmp_path / "cache").glob("*"),
    )  # one, for both runs
    meta = json.loads((cache / "meta.json").read_text())
    [source] = meta["sources"].values()
    ids = torch.from_numpy(np.fromfile(cache / "tokens.bin", meta["dtype"]).astype(int))
    ids = ids[-source["counts"]["val"]["tokens"] :]
    starts = [i for i in range(len(ids) - 1) if i % 32 == 0 or ids[i] == meta["eot_id"]]  # of windows and of documents
    total = 0.0
    for start, end in zip(starts, [*starts[1:], len(ids) - 1], strict=True):
        with torch.no_grad():
            log_p = lm.model(ids[None, start:end])[0].double().log_softmax(-1)
        total -= log_p.gather(1, ids[start + 1 : end + 1, None]).sum().item()
    assert loss == pytest.approx(total / (len(ids) - 1), rel=1e-5)

    with interrupted():
        train_typed(configure(*masked, folder="half"))
    resumed = typed(f"resume={tmp_path / 'half'}", f"data.cache_dir={tmp_path / 'cache'}", base=[])
    assert final_loss(resumed) == pytest.approx(loss, rel=1e-6)


def test_a_vocabulary_can_be_padded_but_not_truncated(configure, tmp_path):
    with pytest.raises(UserError, match="model.vocab_size=299 is too small for the tokenizer's 300 tokens"):
        train_typed(configure("model.vocab_size=299"))
    train_typed(configure("model.vocab_size=320"))
    assert load(tmp_path / "run").config.vocab_size == 320


def test_validations_change_no_training_step(configure, tmp_path):
    """With dropout, whose random numbers they must not take: 8 validations end as one does, bit for bit."""
    dropout = ["model.resid_dropout=0.2", "trainer.accumulate_grad_batches=2", "data.batch_size=2"]
    ends = []
    for interval, folder in ((1, "often"), (8, "once")):
        loss = final_loss(configure(*dropout, f"trainer.val_check_interval={interval}", folder=folder))
        assert sum(bool(row["val/loss"]) for row in rows(tmp_path / folder)) == 8 // interval
        content = torch.load(tmp_path / folder / "checkpoints" / "last.ckpt", weights_only=True)
        ends.append((loss, content["state_dict"]))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(ends[0][1][name], weight) for name, weight in ends[1][1].items())


@pytest.mark.parametrize("interval", [4, 100])
def test_a_last_step_between_two_validations_is_validated_and_saved(configure, tmp_path, interval):
    train_typed(configure("trainer.max_steps=6", f"trainer.val_check_interval={interval}"))
    for name in ("last", "best"):  # the loss falls all the way
        assert torch.load(tmp_path / "run" / "checkpoints" / f"{name}.ckpt", weights_only=True)["global_step"] == 6
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 6


def test_a_prompt_that_the_tokenizer_lacks_is_refused_before_the_first_step(configure, tmp_path):
    with pytest.raises(UserError, match="callbacks.samples: the prompt has 'é'"):
        train_typed(configure("data.tokenizer.kind=char", "callbacks.samples.prompt=é"))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_accumulated_steps_are_complete_over_the_ends_of_epochs(configure, tmp_path):
    """13 windows an epoch in batches of 2: 6 batches, which 4 batches a step do not divide."""
    from tril.data.batches import TrainWindows
    from tril.model.training.module import TrainingModule

    drawn, at_step = [], []
    with pytest.MonkeyPatch.context() as patch:
        batch, step = TrainWindows._batch, TrainingModule.optimizer_step
        patch.setattr(TrainWindows, "_batch", lambda self, indices: (drawn.extend(indices), batch(self, indices))[1])
        patch.setattr(
            TrainingModule,
            "optimizer_step",
            lambda self, *args, **kwargs: (step(self, *args, **kwargs), at_step.append(len(drawn)))[0],
        )
        overrides = ["model.context_length=512", "data.batch_size=2", "trainer.accumulate_grad_batches=4"]
        overrides += ["callbacks.causality=null"]  # which draws windows of other texts
        train_typed(configure(*overrides, "trainer.val_check_interval=16", "trainer.log_every_n_steps=1"))
    assert drawn == list(range(8 * 8))
    assert at_step == [8 * n for n in range(1, 9)]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["tokens"] == 8 * 8 * 512


def test_a_log_that_is_not_utf8_is_no_error(tmp_path, text):
    """An untrained model of bytes writes characters that Latin-1 lacks."""
    byte_tokens = ["data.tokenizer.kind=byte", "data.tokenizer.vocab_size=null", "trainer.max_steps=4"]
    done = command_line(*TINY, *byte_tokens, f"data.path={text}", cwd=tmp_path, PYTHONIOENCODING="latin-1")
    assert done.returncode == 0, done.stderr
