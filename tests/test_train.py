"""train.py end to end on a tiny text: the files of a run, and every invalid setting in one line."""

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import assert_refused
from tests.runs import DRAWN_BY, TINY, command_line, in_process, interrupted, rows
from tril import train as train_script
from tril.model.checkpoint import load
from tril.model.gpt import Block
from tril.model.training.loss_plot import plot_losses
from tril.scripts.common.cli import UserError


def test_the_files_of_a_run(configure, tmp_path, monkeypatch):
    config = configure()
    monkeypatch.setattr(DRAWN_BY, plot_losses)
    metrics = train_script.train(config)
    folder = tmp_path / "run"
    summary = json.loads((folder / "summary.json").read_text())

    assert metrics["val/loss"] == summary["final_val_loss"] < math.log(300)
    assert summary["steps"] == 8 and summary["tokens"] == 8 * 4 * 32
    assert summary["parameters"] == load(folder).model.n_parameters()
    assert Image.open(folder / "loss.png").width == 900
    assert (folder / "samples.txt").read_text(encoding="utf-8").count("--- sample at step") == 2
    assert (folder / "config.yaml").exists()
    certificate = torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True)["tril"]["causality"]
    assert certificate["passed"] and certificate["certified_at_step"] == certificate.pop("of")["step"] == 8
    assert certificate == {key: json.loads((folder / "causality.json").read_text())[key] for key in certificate}
    assert summary["causality"] == "certified"
    logged = rows(folder)
    assert [int(row["step"]) for row in logged if row["train/loss"]] == [2, 4, 6, 8]
    assert [float(row["val/loss"]) for row in logged if row["val/loss"]][-1] == pytest.approx(metrics["val/loss"])
    for column in ("val/loss", "heads/entropy/L1H1", "heads/first/L0H0"):
        assert [int(row["step"]) for row in logged if row[column]] == [4, 8]
    windows = np.load(folder / "windows_last.npz")
    assert windows["nll"].sum() / windows["targets"].sum() == pytest.approx(metrics["val/loss"], rel=1e-6)


def test_bits_per_byte_follow_from_the_whole_validation_text(configure, tmp_path, text):
    metrics = train_script.train(configure())
    lm = load(tmp_path / "run" / "checkpoints" / "last.ckpt")
    content = text.read_text(encoding="utf-8")
    counts = json.loads(next((tmp_path / "cache").glob("*/meta.json")).read_text())["counts"]["val"]
    val = content[-counts["characters"] :]
    assert val[0:5] == "line " and 0.04 < len(val) / len(content) < 0.06

    ids = torch.tensor(lm.tokenizer.encode(val).ids + [lm.tokenizer.token_to_id("<|endoftext|>")])
    total = 0.0
    for start in range(0, len(ids) - 1, 32):
        window = ids[start : start + 33]
        with torch.no_grad():
            log_p = lm.model(window[None, :-1])[0].double().log_softmax(-1)
        total -= log_p.gather(1, window[1:, None]).sum().item()
    assert metrics["val/loss"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    assert metrics["val/bpb"] == pytest.approx(total / math.log(2) / len(val.encode()), rel=1e-5)


def test_a_leak_ends_the_run_before_its_first_step_unless_allowed(configure, tmp_path, monkeypatch):
    forward = Block.forward
    monkeypatch.setattr(
        Block, "forward", lambda self, x, **kwargs: forward(self, x + 1e-3 * x.mean(1, keepdim=True), **kwargs)
    )
    with pytest.raises(
        UserError,
        match="the causality certificate fails .*no future: .*causality.json, or set causality.allow_leak=true",
    ):
        train_script.train(configure())
    assert not (tmp_path / "run" / "checkpoints").exists()
    train_script.train(configure("causality.allow_leak=true"))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["causality"] == "LEAKS, losses are false"


def test_the_certificate_changes_nothing_in_a_run(configure):
    dropout = ["model.resid_dropout=0.1", "model.attn_dropout=0.1"]
    assert train_script.train(configure(*dropout, "~callbacks.causality", folder="without")) == train_script.train(
        configure(*dropout)
    )


def test_same_seed_same_run_other_seed_other_run(configure):
    first, again, other = (
        train_script.train(configure(f"seed={seed}", folder=f"run{n}")) for n, seed in enumerate((0, 0, 1))
    )
    assert first == again
    assert first != other


def test_the_seed_decides_the_order_of_the_data(configure, monkeypatch):
    monkeypatch.setattr(train_script, "derive_seed", lambda seed, purpose: 0)  # the same initialisation for all
    first, other = (train_script.train(configure(f"seed={seed}", folder=f"run{seed}")) for seed in (0, 1))
    assert first != other


def test_dropout_does_not_affect_initialization_and_order(configure, monkeypatch):
    seen = []
    original = train_script.checkpoint_payload
    monkeypatch.setattr(
        train_script,
        "checkpoint_payload",
        lambda model, *rest, **more: (seen.append(model.embed.weight.clone()), original(model, *rest, **more))[1],
    )
    for folder, dropout in (("plain", 0.0), ("dropout", 0.3)):
        train_script.train(
            configure(
                f"model.resid_dropout={dropout}", "trainer.max_steps=1", "optim.schedule.warmup_steps=0", folder=folder
            )
        )
    assert torch.equal(*seen)


def test_accumulation_equals_one_large_batch(configure, tmp_path):
    # All in float32, so without Muon; the eps prevents AdamW from amplifying the rounding of tiny gradients.
    float32 = ["optim=adamw", "optim.eps=1e-3"]
    half = ["data.batch_size=2", "trainer.accumulate_grad_batches=2"]
    accumulated = train_script.train(configure(*float32, *half, folder="half"))
    whole = train_script.train(configure(*float32, folder="whole"))
    # The same windows; only the order of the sums differs.
    assert accumulated["val/loss"] == pytest.approx(whole["val/loss"], rel=1e-6)
    assert json.loads((tmp_path / "half" / "summary.json").read_text())["tokens"] == 8 * 4 * 32


def test_documents_in_a_window_do_not_attend_to_each_other_also_after_resuming(configure, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"the square of {i} is {i * i}."}) + "\n" for i in range(600)))
    masked = ["data.document_mask=true", f"data.path={rows}"]
    metrics = train_script.train(configure(*masked))
    assert metrics["val/loss"] != train_script.train(configure(f"data.path={rows}", folder="unmasked"))["val/loss"]

    lm, [cache] = (
        load(tmp_path / "run" / "checkpoints" / "last.ckpt"),
        (tmp_path / "cache").glob("*"),
    )  # one, for both runs
    meta = json.loads((cache / "meta.json").read_text())
    ids = torch.from_numpy(np.fromfile(cache / "tokens.bin", meta["dtype"]).astype(int))[
        -meta["counts"]["val"]["tokens"] :
    ]
    starts = [i for i in range(len(ids) - 1) if i % 32 == 0 or ids[i] == meta["eot_id"]]  # of windows and of documents
    total = 0.0
    for start, end in zip(starts, [*starts[1:], len(ids) - 1], strict=True):
        with torch.no_grad():
            log_p = lm.model(ids[None, start:end])[0].double().log_softmax(-1)
        total -= log_p.gather(1, ids[start + 1 : end + 1, None]).sum().item()
    assert metrics["val/loss"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)

    with interrupted():
        train_script.train(configure(*masked, folder="half"))
    resumed = train_script.train(configure(f"resume={tmp_path / 'half'}", folder="half"))
    assert resumed == pytest.approx(metrics, rel=1e-6)


def test_a_text_shorter_than_a_window_is_refused_before_a_run_begins(configure, tmp_path):
    with pytest.raises(
        UserError, match="a window needs context_length \\+ 1 = 100001; give more text or lower context_length"
    ):
        train_script.train(configure("model.context_length=100000"))
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_can_be_padded_but_not_truncated(configure, tmp_path):
    with pytest.raises(UserError, match="model.vocab_size=299 is too small for the tokenizer's 300 tokens"):
        train_script.train(configure("model.vocab_size=299"))
    train_script.train(configure("model.vocab_size=320"))
    assert load(tmp_path / "run").config.vocab_size == 320


def test_validations_change_no_training_step(configure, tmp_path):
    """With dropout, whose random numbers they must not take: 8 validations end as one does, to the bit."""
    dropout = ["model.resid_dropout=0.2", "trainer.accumulate_grad_batches=2", "data.batch_size=2"]
    ends = []
    for interval, folder in ((1, "often"), (8, "once")):
        results = train_script.train(configure(*dropout, f"trainer.val_check_interval={interval}", folder=folder))
        assert sum(bool(row["val/loss"]) for row in rows(tmp_path / folder)) == 8 // interval
        content = torch.load(tmp_path / folder / "checkpoints" / "last.ckpt", weights_only=True)
        ends.append((results["val/loss"], content["state_dict"]))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(ends[0][1][name], weight) for name, weight in ends[1][1].items())


@pytest.mark.parametrize("interval", [4, 100])
def test_a_last_step_between_two_validations_is_validated_and_saved(configure, tmp_path, interval):
    train_script.train(configure("trainer.max_steps=6", f"trainer.val_check_interval={interval}"))
    for name in ("last", "best"):  # the loss falls all the way
        assert torch.load(tmp_path / "run" / "checkpoints" / f"{name}.ckpt", weights_only=True)["global_step"] == 6
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 6


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.n_heads=3", "model.dim=128"], "model.n_heads=3 must divide model.dim=128"),
        (["model.n_head=3"], "there is no setting model.n_head; did you mean model.n_heads?"),
        (["+model.head_dims=3"], "there is no setting model.head_dims; did you mean model.head_dim?"),
        (["model=nanoo"], "there is no model=nanoo; did you mean nano?"),
        (["data=shakespear"], "there is no data=shakespear; did you mean shakespeare?"),
        (["trainer.max_step=3"], "there is no setting trainer.max_step; did you mean trainer.max_steps?"),
        (["+trainer.max_epoch=3"], "there is no setting trainer.max_epoch; did you mean trainer.max_epochs?"),
        (
            ["trainer.max_steps=0", "trainer.log_every_n_steps=x"],
            "trainer.max_steps=0 must be greater than or equal to 1; trainer.log_every_n_steps='x' must be a valid",
        ),
        (["optim.lr=fast"], "optim.lr='fast' must be a valid number"),
        (["compile=maybe"], "compile=maybe must be 'auto', True, False, 'default', 'reduce-overhead'"),
        (["trainer.precision=fp8"], "trainer.precision=fp8 must be 'auto', '32-true'"),
        (["~trainer.max_steps"], "trainer.max_steps is missing and required; leave out ~trainer.max_steps, or set"),
        (
            ["optim=adamw", "optim.muon_lr=0.1"],
            "optim.muon_lr=0.1 has no effect with optim.kind=adamw; leave it out, or",
        ),
        (["optim.schedule.warmup_steps=2000"], "longer than the run of 900 steps"),
        (["data.batch_size=0"], "data.batch_size=0"),
        (["data=files", "data.path=nowhere/*.txt"], "data.path=nowhere/*.txt matches no file"),
        (["data.tokenizer.vocab_size=10"], "data.tokenizer.vocab_size=10"),
        (["trainer.accelerator=tpu"], "trainer.accelerator=tpu must be 'auto', 'cuda', 'mps' or 'cpu'"),
        (
            ["model.backend=flex", "trainer.accelerator=cpu"],
            "model.backend=flex needs trainer.accelerator=cuda to train, not cpu; use model.backend=fused",
        ),
        (["data=files"], "data.path is missing"),
        (["model.qk_norm=foo"], "model.qk_norm=foo must be 'rmsnorm', 'layernorm' or 'none'"),
        (["model.pos=learned", "model.rope_base=500"], "model.rope_base=500 has no effect with model.pos=learned"),
        (["model.mlp_hidden=99", "model.mlp_ratio=2"], "model.mlp_ratio=2 has no effect with model.mlp_hidden=99, the"),
        (["seed=-1"], "seed=-1 must be greater than or equal to 0"),
        (["model.causal=false"], "so its losses would be false; set causality.allow_leak=true if that is intended"),
        (["causality.allow_leak=maybe"], "causality.allow_leak='maybe' must be a valid boolean"),
        (["resume=nowhere"], "nowhere does not exist"),
        (["trainer.gradient_clip_val=abc"], "trainer.gradient_clip_val='abc' must be a valid number"),
        (["callbacks.progress.lines=0"], "callbacks.progress.lines=0 must be greater than or equal to 1"),
        (["logger=null"], "Config group override must be a string"),
        (["+callbacks.progress.line=2"], "callbacks.progress.line is unknown"),
        (["model.n_heads"], "n_heads"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_settings_end_in_one_line_and_leave_no_files(overrides, message, tmp_path):
    assert_refused(in_process(*overrides, cwd=tmp_path), message)
    assert not list(tmp_path.rglob("*.yaml"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["callbacks.samples.max_new_tokens=0"],
            "callbacks.samples.max_new_tokens=0 must be greater than or equal to 1",
        ),
        (["callbacks.samples.temperature=-1"], "callbacks.samples.temperature=-1 must be"),
        (["data.tokenizer.kind=char", "callbacks.samples.prompt='é'"], "callbacks.samples: the prompt has 'é'"),
    ],
    ids=str,
)
def test_invalid_samples_are_refused_before_the_first_step(configure, tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        train_script.train(configure(*overrides))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_null_removes_a_callback(configure, tmp_path):
    train_script.train(configure("callbacks.samples=null"))
    assert not (tmp_path / "run" / "samples.txt").exists()


def test_the_command_refuses_in_one_line(tmp_path):
    assert_refused(command_line("trainer.gradient_clip_val=abc", cwd=tmp_path), "trainer.gradient_clip_val='abc'")
    assert not list(tmp_path.rglob("*.yaml"))


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
        train_script.train(configure(*overrides, "trainer.val_check_interval=16", "trainer.log_every_n_steps=1"))
    assert drawn == list(range(8 * 8))
    assert at_step == [8 * n for n in range(1, 9)]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["tokens"] == 8 * 8 * 512


def test_a_log_that_is_not_utf8_is_no_error(tmp_path, text):
    """An untrained model of bytes writes characters that Latin-1 lacks."""
    byte_tokens = ["data.tokenizer.kind=byte", "data.tokenizer.vocab_size=null", "trainer.max_steps=4"]
    done = command_line(*TINY, *byte_tokens, f"data.path={text}", cwd=tmp_path, PYTHONIOENCODING="latin-1")
    assert done.returncode == 0, done.stderr
