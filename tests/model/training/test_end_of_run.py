"""What a run prints at its end: at most twelve lines, and more only for what is unusual."""

import math

import pytest

from tril.model.training.end_of_run import duration, show

SUMMARY = {
    "final_val_loss": 2.5, "final_val_bpb": 1.25, "best_val_loss": 2.5, "best_val_bpb": 1.25, "best_step": 900,
    "steps": 900, "tokens": 900 * 2048, "tokens_per_second": 6877.4, "seconds": 268.4, "causality": "certified",
    "sources": None, "old_loss_before": None, "old_loss_after": None, "old_bpb_before": None, "old_bpb_after": None,
    "skipped_steps": {"count": 0, "steps": []}, "stopped_early": None,
    "profile": None,
    "val_windows": {"scored": 90, "of": 90},
    "init_from": None,
    "folder": "outputs/A/B",
}  # fmt: skip


def test_a_usual_run():
    assert show(SUMMARY).splitlines() == [
        "  validation  1.2500 bits per byte, 2.5000 nats per token",
        "  training    900 steps of 2,048 tokens in 4 min 28 s, 6,877 tokens per second",
        "  causality   certified",
        "  folder      outputs/A/B: summary.json has all figures, loss.png the curve",
        '  next        python scripts/sample.py ckpt=outputs/A/B prompt="..."',
        "              python scripts/heads.py ckpt=outputs/A/B",
        "              python scripts/certify.py ckpt=outputs/A/B",
    ]


def test_what_is_unusual():
    skipped = {"count": 7, "steps": [10, 20, 30, 40, 50, 60, 70]}
    changes = {"best_step": 800, "best_val_bpb": 1.2, "skipped_steps": skipped}
    changes |= {"stopped_early": "at step 900: no lower loss", "tokens_per_second": math.nan}
    changes |= {"old_loss_before": 3.0, "old_loss_after": 4.0, "old_bpb_before": 1.5, "old_bpb_after": 2.0}
    changes |= {"init_from": "hf:ORG/NAME@1"}
    lines = show(SUMMARY | changes).splitlines()
    assert "  init from   hf:ORG/NAME@1" in lines
    assert lines[0].endswith("2.5000 nats per token; best 1.2000 at step 800")
    assert (
        lines[1]
        == "  old text    1.5000 bits per byte before, 2.0000 after; nats per token 3.0000 before, 4.0000 after"
    )
    assert lines[2] == "  training    900 steps of 2,048 tokens in 4 min 28 s"
    assert "  skipped     7 at step 10, 20, 30, 40, 50, ..." in lines
    assert "  stopped     at step 900: no lower loss" in lines and len(lines) <= 13


def test_a_line_for_each_source_of_a_mixture():
    sources = {
        name: {"final_val_loss": 2.0 * i, "final_val_bpb": float(i), "epochs": 0.5, "share": 0.5}
        for i, name in enumerate(("code", "notes/*.md"), 1)
    }
    lines = show(SUMMARY | {"sources": sources}).splitlines()
    assert lines[1:3] == [
        "              1.0000 bits per byte, 2.0000 nats per token; 0.50 epochs: code",
        "              2.0000 bits per byte, 4.0000 nats per token; 0.50 epochs: notes/*.md",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 0 min"),
        (7500, "2 h 5 min"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
