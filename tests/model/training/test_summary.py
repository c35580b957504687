"""The lines at the end of a run, and which code and memory its summary names."""

import math
import subprocess

import torch

from tril.model.training.summary import PACKAGE, code_version, peak_memory_bytes, show

SUMMARY = {
    "final_val_loss": 2.5, "final_val_bpb": 1.25, "best_val_loss": 2.5, "best_val_bpb": 1.25, "best_step": 900,
    "steps": 900, "tokens": 900 * 2048, "seconds": 268.4, "train_seconds": 200.0, "causality": "certified",
    "sources": None, "stopped_early": None,
    "val_windows": {"scored": 90, "of": 90}, "init_from": None, "folder": "outputs/A/B",
}  # fmt: skip


def test_a_usual_run():
    assert show(SUMMARY, "tril sample").splitlines() == [
        "  validation  1.2500 bits per byte, 2.5000 nats per token",
        "  training    900 steps, 1,843,200 tokens in 03:20, 9,216 tokens per second; 04:28 with validation and start",
        "  causality   certified",
        "  folder      outputs/A/B: summary.json has all figures, loss.png the curve",
        '  next        tril sample ckpt=latest prompt="..."',
    ]


def test_what_is_unusual():
    changes = {"best_step": 800, "best_val_bpb": 1.2, "best_val_loss": 2.4, "train_seconds": 0.0}
    changes |= {"init_from": "hf:ORG/NAME@1"}
    changes |= {"stopped_early": "at step 900: no lower loss", "sources": {"code": SUMMARY | {"epochs": 0.5}}}
    lines = show(SUMMARY | changes, "tril sample").splitlines()
    assert lines[0].endswith("best 1.2000 bits per byte, 2.4000 nats per token at step 800 (best.ckpt)")
    assert lines[1].endswith("1.2500 bits per byte, 2.5000 nats per token; 0.50 epochs: code")
    assert "  init from   hf:ORG/NAME@1" in lines
    assert "  stopped     at step 900: no lower loss" in lines


def test_the_memory_of_a_run_is_that_of_its_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 10**15)
    assert peak_memory_bytes("cuda") == 3 * 10**15 and 1e7 < peak_memory_bytes("cpu") < 3 * 10**15
    assert math.isfinite(peak_memory_bytes("mps"))


def test_the_code_version_is_that_of_this_checkout_alone_and_counts_changes_of_tracked_files(tmp_path):
    """A package installed within another repository has none."""
    package = tmp_path / "site-packages" / "tril"
    package.mkdir(parents=True)
    assert code_version(package) is None

    def git(*command):
        identity = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org"]
        subprocess.run(["git", "-C", tmp_path, *identity, *command], check=True, capture_output=True)

    (tmp_path / "tracked").write_text("a")
    git("init")
    git("add", "tracked")
    git("commit", "-m", "theirs")
    assert code_version(package) is None
    (package / "untracked").touch()
    commit = code_version(tmp_path)
    assert commit is not None and len(commit) == 12
    (tmp_path / "tracked").write_text("b")
    assert code_version(tmp_path) == commit + "+"
    assert (code_version() is None) != (PACKAGE / ".git").exists()
