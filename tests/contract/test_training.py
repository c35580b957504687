"""Training: losses, counts, learning rates and precision of small runs."""

import math
import re
from pathlib import Path

import pytest
import torch
import yaml

from tests.contract import harness
from tests.contract.harness import assert_golden, metrics, summary
from tril import load

TINY = (*(setting for setting in harness.TINY if "tokenizer" not in setting), "data.tokenizer.kind=byte")
BASE = (*TINY, *harness.BARE, "trainer.max_steps=30", "trainer.val_check_interval=15", "optim.lr_scale=0.5")
RUNS = {  # together they use every option of the model and of the optimizer
    "gpt2": "model.pos=learned model.norm=layernorm model.norm_eps=1e-3 model.bias=true model.mlp=gelu "
    "model.qk_norm=none model.init=gpt2 optim=adamw optim.lr=0.01 optim.weight_decay=0.3 optim.betas=[0.8,0.98] "
    "optim.eps=1e-4 optim.schedule.kind=cosine optim.schedule.min_lr_ratio=0.2",
    "llama": "model.mlp=swiglu model.mlp_hidden=48 model.n_kv_heads=1 model.head_dim=12 model.rope_base=20 "
    "model.tie_embeddings=false model.qkv_bias=true optim.schedule.kind=linear",
    "alibi": "model.pos=alibi model.window=7 model.n_heads=4 model.n_kv_heads=2 model.qk_norm=layernorm "
    "model.backend=explicit optim.muon_weight_decay=1 optim.schedule.decay_fraction=0.2",
    "dropout": "model.embd_dropout=0.1 model.attn_dropout=0.2 model.resid_dropout=0.3 model.backend=stacked seed=1",
    "padded vocabulary": "model.vocab_size=320 model.logit_softcap=2 model.mlp=relu model.mlp_ratio=2.5 "
    "optim.momentum=0.5 optim.nesterov=false optim.schedule.kind=constant optim.schedule.warmup_steps=5",
    "no attention": "model.n_heads=0 model.mlp=gelu_erf model.pos=learned optim=adamw optim.lr=0.01",
    "no FFN": "model.mlp=none model.pos=none optim.kind=muon optim.muon_lr=0.03 optim.lr=0.01",
    "not causal": "model.causal=false causality.allow_leak=true model.checkpoint_activations=true "
    "optim.scale_with_width=true optim.base_width=64 optim.base_head_dim=4",
    "accumulation": "trainer.accumulate_grad_batches=7 data.batch_size=5",  # an epoch has 19.4 steps
    "documents": "data.document_mask=true model.context_length=700 data.batch_size=1",
    "three layers": "model.n_layers=3 model.dim=48 optim.ns_steps=3 optim.adjust_lr=match_rms_adamw",
    "part of the validation": "data.tokenizer.kind=bpe data.tokenizer.vocab_size=300 trainer.gradient_clip_val=0.1 "
    "data.val_batch_size=3 +trainer.limit_val_batches=5",
}


@pytest.fixture(scope="module")
def run_of(once, texts):
    def run_of(name: str) -> Path:
        return harness.newest_run(once(f"training {name}", lambda cwd: small_run(cwd, texts, *RUNS[name].split())))

    return run_of


def small_run(cwd: Path, texts: Path, *settings: object, base: tuple[str, ...] = BASE) -> Path:
    validation = f"data.val_path={texts.parent / '3[89].txt'}"  # two files, so that no rule of splitting matters
    return harness.train_run(
        validation, *settings, cwd=cwd, text=texts, base=base, TRIL_CACHE=f"{texts.parent.parent}/cache"
    )


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load(str(folder), device="cpu").model.state_dict()


@pytest.mark.parametrize("name", RUNS)
def test_the_losses_of_a_run_are_the_recorded_ones(name, run_of):
    train, val = (metrics(run_of(name), f"{part}/loss") for part in ("train", "val"))
    content = summary(run_of(name))
    values = {key: content[key] for key in ("steps", "tokens", "parameters", "training_text_tokens", "final_val_loss")}
    assert_golden("training", name, values | {"train": [train[step] for step in (1, 2, 10, 20, 30)], "val": val[15]})
    assert len(train) == 30 and list(val) == [15, 30] and content["final_val_loss"] == val[30] < train[1]


def test_every_option_and_choice_of_model_and_optimizer_is_in_a_run(tmp_path):
    help, used = harness.run("train", "--help", cwd=tmp_path).out, {*BASE, *" ".join(RUNS.values()).split()}
    listed = re.findall(r"^  ((?:model|optim)\.\S+?)=(\S+) +(.*)", help, re.MULTILINE)
    assert len(listed) > 20 and {key for key, *_ in listed} <= {setting.partition("=")[0] for setting in used}
    for key, default, choices in listed:
        for choice in re.findall(r"\| (\w+)", choices):
            assert f"{key}={choice}" in used or choice in (default, "flex"), (key, choice)  # flex trains on GPUs only


@pytest.mark.parametrize("name", ["gpt2", "llama", "alibi", "no attention"])
def test_parameters_and_flops_are_those_of_the_formulas(name, run_of):
    c = yaml.safe_load((run_of(name) / "config.yaml").read_text("utf-8"))["model"]
    vocab, dim, layers, length, heads = 257, c["dim"], c["n_layers"], c["context_length"], c["n_heads"]
    groups, size, bias = c["n_kv_heads"] or heads, c["head_dim"] or dim // max(1, heads), c["bias"]
    hidden, matrices = c["mlp_hidden"] or round(dim * c["mlp_ratio"]), 3 if c["mlp"] == "swiglu" else 2
    norm = dim * (1 + bias)
    attention = norm + (2 * heads + 2 * groups) * size * dim + 2 * size * (c["qk_norm"] != "none")
    attention += (heads + 2 * groups) * size * bool(bias or c["qkv_bias"]) + dim * bias
    body = layers * (norm + matrices * dim * hidden + (hidden + dim) * bias + attention * bool(heads)) + norm
    tables = vocab * (1 if c["tie_embeddings"] else 2) + length * (c["pos"] == "learned")
    keys = sum(min(query + 1, c["window"] or length) for query in range(length)) / length  # of a query, on average
    flops = 6 * (body + vocab * dim) + 12 * layers * heads * size * keys  # forward and backward (PaLM, appendix B)
    expected = {"parameters": body + tables * dim, "parameters_without_embeddings": body, "flops_per_token": flops}
    assert {key: summary(run_of(name))[key] for key in expected} == pytest.approx(expected, abs=0.5)


def test_loss_and_bits_per_byte_are_those_of_the_logits_over_windows_in_order(run_of, texts):
    lm, content = (read(run_of("part of the validation")) for read in (load, summary))
    end, documents = lm.tokenizer.token_to_id("<|endoftext|>"), [texts.parent / "38.txt", texts.parent / "39.txt"]
    ids = torch.tensor([i for path in documents for i in (*lm.tokenizer.encode(path.read_text("utf-8")).ids, end)])
    targets = ids[1 : 5 * 3 * 32 + 1]  # batches, windows, positions
    with torch.no_grad():
        logits = lm.model(ids[: len(targets)].view(15, 32)).double().flatten(0, 1)
    nats = -logits.log_softmax(-1).gather(1, targets[:, None]).sum().item()
    size = len(lm.tokenizer.decode(targets[targets != end].tolist()).encode())
    assert content["val_windows"] == {"scored": 15, "of": math.ceil((len(ids) - 1) / 32)}
    assert content["final_val_loss"] == pytest.approx(nats / len(targets), rel=1e-6)
    assert content["final_val_bpb"] == pytest.approx(nats / math.log(2) / size, rel=1e-6)


def test_bits_per_byte_of_the_whole_validation_part_count_the_bytes_of_what_is_predicted(run_of, texts):
    lm, content = (read(run_of("gpt2")) for read in (load, summary))
    end, documents = lm.tokenizer.token_to_id("<|endoftext|>"), [texts.parent / "38.txt", texts.parent / "39.txt"]
    ids = [i for path in documents for i in (*lm.tokenizer.encode(path.read_text("utf-8")).ids, end)]
    size = len(lm.tokenizer.decode([i for i in ids[1:] if i != end]).encode())  # the first token is no target
    nats = content["final_val_loss"] * (len(ids) - 1)
    assert content["final_val_bpb"] == pytest.approx(nats / math.log(2) / size, rel=1e-6)


SCHEDULES = {  # steps of the warm-up, peak, and what follows
    "gpt2": (2, 0.005, lambda step: 0.6 + 0.4 * math.cos(math.pi * (step - 2) / 28)),
    "llama": (2, 0.01, lambda step: (30 - step) / 28),
    "alibi": (2, 0.01, lambda step: min(1, (30 - step) / 6)),
    "padded vocabulary": (5, 0.01, lambda step: 1),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_learning_rates_follow_the_formula_of_the_schedule(name, run_of):
    warmup, peak, shape = SCHEDULES[name]
    for step, rate in metrics(run_of(name), "lr/decay").items():  # a row has that of the next step
        factor = (step + 1) / (warmup + 1) if step < warmup else shape(step)
        assert rate == pytest.approx(peak * factor, rel=1e-9), step


def test_accumulated_gradients_are_those_of_a_larger_batch(texts, tmp_path):
    three = small_run(tmp_path / "three", texts, "data.batch_size=2", "trainer.accumulate_grad_batches=3")
    one = small_run(tmp_path / "one", texts, "data.batch_size=6")
    for column in ("train/loss", "val/loss", "grad_norm/total"):
        assert metrics(three, column) == pytest.approx(metrics(one, column), rel=1e-5), column


def test_a_seed_repeats_a_run_bit_for_bit_and_another_one_changes_it(run_of, texts, tmp_path):
    first = run_of("dropout")
    same, other = (small_run(tmp_path / f"{n}", texts, *RUNS["dropout"].split(), f"seed={n}") for n in (1, 2))
    assert metrics(same, "train/loss") == metrics(first, "train/loss")
    assert all(torch.equal(tensor, weights_of(first)[name]) for name, tensor in weights_of(same).items())
    assert metrics(other, "train/loss")[1] != metrics(first, "train/loss")[1]


def test_dropout_leaves_the_initial_weights_unchanged(texts, tmp_path):
    still = ("optim.lr_scale=1e-30", "trainer.max_steps=2", "trainer.val_check_interval=2")
    runs = (small_run(tmp_path / f"{p}", texts, *still, f"model.resid_dropout={p}") for p in (0, 0.5))
    first, second = map(weights_of, runs)
    assert all(torch.allclose(tensor, second[name], rtol=0, atol=1e-20) for name, tensor in first.items())


def test_a_certified_run_of_two_windows_in_bf16_stays_near_one_in_float32(texts, tmp_path):
    losses, certified = [], (*TINY, *harness.BARE[:2], "trainer.max_steps=30", "optim.lr_scale=0.5")
    for precision in ("32-true", "bf16-mixed"):
        settings = ("data.batch_size=2", f"trainer.precision={precision}")
        folder = small_run(tmp_path / precision, texts, *settings, base=certified)
        losses.append(metrics(folder, "train/loss"))
        assert losses[-1][30] < losses[-1][1] - 1 and (folder / "causality.json").is_file()
    assert 1e-4 < max(abs(losses[0][step] - losses[1][step]) for step in losses[0]) < 0.01  # measured: 0.003


def test_a_gradient_that_is_not_finite_ends_the_run_before_the_update(texts, tmp_path):
    huge = harness.merged(BASE, f"data.path={texts}", "optim.lr_scale=1e30", "trainer.val_check_interval=1")
    done = harness.run("train", *huge, cwd=tmp_path)
    content, line = summary(harness.newest_run(tmp_path)), done.err.splitlines()[-1]
    assert done.status == 2 and line == f"error: {content['diverged']}" and "Traceback" not in done.err
    assert "step 2 " in line and content["steps"] == 1 and content["final_val_loss"] is None
    assert all(tensor.isfinite().all() for tensor in weights_of(harness.newest_run(tmp_path)).values())
