"""Training: losses, counts, learning rates and precision of small runs."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.contract.harness import BARE, assert_golden, merged, metrics, run, summary
from tril.model import load

GOLDEN = tuple(
    """
    data.tokenizer.kind=byte trainer.max_steps=30 trainer.val_check_interval=15 optim.lr_scale=0.5
    optim.normalize_rows=false
    optim.betas=[0.9,0.95] data.double_length_at=[] model.key_offset=false model.embed_skip=false
    model.value_embed=false
    """.split()
)
BASE = merged(BARE, *GOLDEN)
RUNS = {  # name -> settings, which replace those of BASE
    "gpt2": (
        "model.pos=learned model.norm=layernorm model.norm_eps=1e-3 model.bias=true model.mlp=gelu "
        "model.qk_norm=none model.init=gpt2 -optim.normalize_rows optim=adamw optim.lr=0.01 optim.weight_decay=0.3 "
        "optim.betas=[0.8,0.98] optim.eps=1e-4 optim.schedule.kind=cosine optim.schedule.min_lr_ratio=0.2"
    ),
    "llama": (
        "model.mlp=swiglu model.mlp_hidden=48 model.n_kv_heads=1 model.head_dim=12 model.rope_base=20 "
        "model.tie_embeddings=false model.qkv_bias=true optim.schedule.kind=linear"
    ),
    "alibi": (
        "model.pos=alibi model.window=7 model.n_heads=4 model.n_kv_heads=2 model.qk_norm=layernorm "
        "model.backend=explicit optim.muon_weight_decay=1 optim.schedule.decay_fraction=0.2"
    ),
    "dropout": (
        "model.embd_dropout=0.1 model.attn_dropout=0.2 model.resid_dropout=0.3 model.backend=stacked seed=1 "
        "callbacks.causality={}"
    ),
    "padded vocabulary": (
        "model.vocab_size=320 model.logit_softcap=2 model.mlp=relu model.mlp_ratio=2.5 optim.momentum=0.5 "
        "optim.nesterov=false optim.schedule.kind=constant optim.schedule.warmup_steps=5"
    ),
    "no attention": (
        "-model.key_offset -model.value_embed model.n_heads=0 model.mlp=gelu_erf model.pos=learned "
        "-optim.normalize_rows optim=adamw optim.lr=0.01"
    ),
    "no FFN": "model.mlp=none model.pos=none optim.kind=muon optim.muon_lr=0.03 optim.lr=0.01",
    "not causal": "model.causal=false causality.allow_leak=true model.checkpoint_activations=true",
    "accumulation": "trainer.accumulate_grad_batches=7 data.batch_size=5",
    "documents": "data.document_mask=true model.context_length=700 data.batch_size=1",
    "embeddings": (
        "model.key_offset=true model.embed_skip=true model.value_embed=true model.n_layers=3 model.n_kv_heads=1 "
        "model.head_dim=12"
    ),
    "three layers": "model.n_layers=3 model.dim=48 optim.ns_steps=3 optim.adjust_lr=match_rms_adamw",
    "normalized rows": "optim.normalize_rows=true",
    "part of the validation": (
        "data.tokenizer.kind=bpe data.tokenizer.vocab_size=300 trainer.gradient_clip_val=0.1 data.val_batch_size=3 "
        "+trainer.limit_val_batches=5"
    ),
}  # together they use every option of the model and of the optimizer; in "accumulation" an epoch has 19.4 steps


@pytest.fixture(scope="module")
def run_of(run_of, texts):
    """A function: the folder of a run of the table, with more settings, or of a run with these settings only."""
    val = f"data.val_path={texts.parent}/3[89].txt"  # two files, so that no split matters
    return lambda name, more="": run_of(val, *RUNS.get(name, name).split(), *more.split(), base=BASE)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load(folder, device="cpu").model.state_dict()


@pytest.mark.parametrize("name", RUNS)
def test_the_losses_of_a_run_are_the_recorded_ones(name, run_of):
    train, val = (metrics(run_of(name), f"{part}/loss") for part in ("train", "val"))
    content = summary(run_of(name))
    values = {key: content[key] for key in ("steps", "tokens", "parameters", "training_text_tokens", "final_val_loss")}
    values |= {f"train {step}": train[step] for step in (1, 2, 10, 20, 30)} | {"val 15": val[15]}
    assert_golden("training", name, values)
    assert len(train) == 30 and list(val) == [15, 30] and content["final_val_loss"] == val[30] < train[1]


def test_every_option_and_choice_of_model_and_optimizer_is_in_a_run(tmp_path):
    help, used = run("train", "--help=all", cwd=tmp_path).stdout, {*BASE, *" ".join(RUNS.values()).split()}
    listed = re.findall(r"^  ((?:model|optim)\.\S+?)=(\S+) +(.*)", help, re.MULTILINE)
    assert len(listed) > 20 and {key for key, *_ in listed} <= {setting.partition("=")[0] for setting in used}
    for key, default, choices in listed:
        for choice in re.findall(r"\| (\w+)", choices):
            assert f"{key}={choice}" in used or choice == default, (key, choice)


@pytest.mark.parametrize(("name", "limit"), [("gpt2", 10**9), ("part of the validation", 5 * 3)])
def test_loss_and_bits_per_byte_are_those_of_the_logits_over_windows_in_order(name, limit, run_of, texts):
    lm, content = (read(run_of(name)) for read in (load, summary))
    end, documents = lm.tokenizer.token_to_id("<|endoftext|>"), [texts.parent / "38.txt", texts.parent / "39.txt"]
    ids = torch.tensor([i for path in documents for i in (*lm.tokenizer.encode(path.read_text("utf-8")).ids, end)])
    targets = ids[1 : limit * 32 + 1]  # the first token is no target
    windows = torch.nn.functional.pad(ids[: len(targets)], (0, -len(targets) % 32)).view(-1, 32)
    with torch.no_grad():
        logits = lm.model(windows).double().flatten(0, 1)[: len(targets)]
    nll = -logits.log_softmax(-1).gather(1, targets[:, None]).flatten()
    size = len(lm.tokenizer.decode(targets[targets != end].tolist()).encode())
    assert content["val_windows"] == {"scored": len(windows), "of": math.ceil((len(ids) - 1) / 32)}
    assert content["final_val_loss"] == pytest.approx(nll.mean().item(), rel=1e-6)
    assert content["final_val_bpb"] == pytest.approx(nll.sum().item() / math.log(2) / size, rel=1e-6)
    stored, document = np.load(run_of(name) / "windows_last.npz"), (ids[: len(targets)] == end).cumsum(0)
    for prefix, owner in (("", torch.arange(len(targets)) // 32), ("document_", document)):
        assert stored[f"{prefix}nll"] == pytest.approx(np.bincount(owner, nll), rel=1e-4)
        assert stored[f"{prefix}targets"].tolist() == np.bincount(owner).tolist()


def test_accumulated_gradients_are_those_of_a_larger_batch(run_of):
    parts, whole = run_of("data.batch_size=3", "trainer.accumulate_grad_batches=2"), run_of("data.batch_size=6")
    for column in ("train/loss", "val/loss", "grad_norm/total", "train/tokens"):
        assert metrics(parts, column) == pytest.approx(metrics(whole, column), rel=1e-5), column


def test_a_seed_repeats_a_run_bit_for_bit(run_of):
    first, same, other = (run_of("dropout", settings) for settings in ("", "seed=1", "seed=2"))
    assert metrics(same, "train/loss") == metrics(first, "train/loss")
    assert all(torch.equal(tensor, weights_of(first)[name]) for name, tensor in weights_of(same).items())
    assert metrics(other, "train/loss")[1] != metrics(first, "train/loss")[1]


def test_a_gradient_that_is_not_finite_ends_the_run_before_the_update(texts, tmp_path):
    huge = merged(BASE, f"data.path={texts}", "optim.lr_scale=1e30", "trainer.val_check_interval=1")
    done, folder = run("train", *huge, "hydra.run.dir=run", cwd=tmp_path), tmp_path / "run"
    content, line = summary(folder), done.stderr.splitlines()[-1]
    assert done.returncode == 2 and line == f"error: {content['diverged']}" and "Traceback" not in done.stderr
    assert "step 2 " in line and content["steps"] == 1 and content["final_val_loss"] is None
    assert all(tensor.isfinite().all() for tensor in weights_of(folder).values())


def test_a_run_stops_after_its_time(run_of):
    limit = "trainer.max_time=00:00:00:01 trainer.max_steps=1000000 trainer.val_check_interval=1000000"
    content = summary(run_of(limit))
    assert content["steps"] < 1000000 and "trainer.max_time" in content["stopped_early"]
