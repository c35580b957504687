"""evaluate.py on a tiny run: against the run's own validation, closed forms of a uniform model, and what it refuses."""

import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests import runs
from tests.calls import call
from tests.conftest import assert_refused, tiny_gpt
from tests.model.test_checkpoint import rewrite
from tril.data.tokenizer import TokenizerConfig, build
from tril.model.checkpoint import load, save
from tril.model.evaluation.subject import Subject
from tril.model.generation.language_model import LanguageModel
from tril.scripts.evaluate import main

VOCAB = 300  # of the run
SETTINGS = [
    "data.val_fraction=0.3",
    "trainer.max_steps=20",
    "trainer.val_check_interval=20",
    "trainer.log_every_n_steps=10",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A working directory with a run on 40 documents, and two models without a run: uniform, with its tokenizer, and
    uniform.bytes, with bytes."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "docs").mkdir()
    for d in range(40):
        lines = (f"caf\u00e9 {d}: line {i}, product {d * i}, sum {d + i}.\n" for i in range(4))
        (folder / "docs" / f"{d}.txt").write_text("".join(lines), encoding="utf-8")
    done = runs.in_process(
        *runs.TINY, *SETTINGS, f"data.path={folder / 'docs'}", f"hydra.run.dir={folder / 'run'}", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    lm = load(folder / "run" / "checkpoints" / "last.ckpt")
    for name, size, tokenizer in (
        ("uniform", VOCAB, lm.tokenizer),
        ("bytes", 320, build(TokenizerConfig(kind="byte"), ())),
    ):
        model = tiny_gpt(vocab_size=size)  # with a context of 12 tokens, and 32 in the run
        torch.nn.init.zeros_(model.head.weight)
        save(folder / f"{name}.ckpt", LanguageModel(model, tokenizer))
    return folder


def run(folder, *arguments):
    return call(main, *arguments, cwd=folder, strict=True, TRIL_CACHE=str(folder / "cache"))


def evaluated(folder, *arguments, out="out"):
    """evaluation.json, and what was printed."""
    done = run(folder, *arguments, f"out={out}", "device=cpu")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (folder / out).iterdir()} == {"evaluation.json", "evaluation.png"}
    return json.loads(
        (folder / out / "evaluation.json").read_text(encoding="utf-8"), parse_constant=pytest.fail
    ), done.stdout


def text_files(folder):
    return [path.read_text(encoding="utf-8") for path in sorted((folder / "docs").iterdir())]


def test_the_figures_are_those_of_the_runs_own_validation(trained):
    report, stdout = evaluated(trained, "ckpt=run", "stride=8")
    summary = json.loads((trained / "run" / "summary.json").read_text())
    found = report["protocols"]["non_overlapping"]
    figures = {name: interval["mean"] for name, interval in found["figures"].items()}
    # A run divides by the bytes of the targets, evaluate.py by those of the text, which tokenizers have in common.
    bits, text_bytes = found["targets"] * figures["loss"] / math.log(2), report["text"]["bytes"]
    assert bits / figures["bits_per_byte"] == pytest.approx(text_bytes)
    first = load(trained / "run").tokenizer.decode(validation_tokens(trained)[:1].tolist())
    assert bits / summary["final_val_bpb"] == pytest.approx(text_bytes - len(first.encode()))
    assert figures["loss"] == pytest.approx(summary["final_val_loss"], abs=5e-6)
    assert f"{figures['bits_per_byte']:.4f} [" in stdout
    assert figures["perplexity"] == pytest.approx(math.exp(figures["loss"]))
    windows = np.load(trained / "run" / "windows_last.npz")
    assert (found["targets"], found["windows"]) == (windows["targets"].sum(), len(windows["targets"]))
    assert found["observations"]["clusters"] == len(windows["document_nll"]) >= 10
    assert report["text"]["name"] == "the validation part of the run"
    assert [row["last"] for row in found["positions"]] == [1, 2, 4, 8, 16, 32]

    sliding = report["protocols"]["sliding"]
    assert (sliding["targets"], sliding["bytes"]) == (found["targets"], found["bytes"])
    assert sliding["windows"] == 1 + math.ceil((found["targets"] - 32) / 8)
    lm, tokens = load(trained / "run"), validation_tokens(trained)
    nll = 0.0
    for target in range(1, len(tokens)):  # the first window that holds the target scores it
        start = max(0, math.ceil((target - 32) / 8)) * 8
        with torch.no_grad():
            nll -= lm.model(tokens[None, start:target])[0, -1].double().log_softmax(-1)[tokens[target]].item()
    assert sliding["figures"]["loss"]["mean"] == pytest.approx(nll / (len(tokens) - 1), abs=1e-5)
    assert "| ckpt, stride 32 | ckpt, stride 8 |" in " ".join(stdout.split())


def validation_tokens(folder):
    from tril.scripts.cli.finished_run import read_run
    from tril.scripts.cli.finished_run import validation_tokens as tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIL_CACHE", str(folder / "cache"))
        [text] = tokens(read_run(folder / "run" / "checkpoints" / "last.ckpt"))
        return torch.from_numpy(text.astype(np.int64))


def test_a_uniform_model_on_a_whole_text(trained):
    """Each target costs ln V; the bytes are those of the files."""
    arguments = ["ckpt=bytes.ckpt", "data=files", "data.path=docs", "part=all"]
    report, stdout = evaluated(trained, *arguments)
    n_bytes = sum(len(text.encode()) for text in text_files(trained))
    n_targets = n_bytes + 40 - 1  # bytes, and the end of each text, but the first token
    assert (report["text"]["bytes"], report["text"]["tokens"]) == (n_bytes, n_targets + 1)
    figures = report["protocols"]["non_overlapping"]["figures"]
    assert figures["loss"]["mean"] == pytest.approx(math.log(320), abs=1e-6)
    assert figures["bits_per_byte"]["mean"] == pytest.approx(math.log2(320) * n_targets / n_bytes, abs=1e-6)
    ends = 40 / n_targets  # of equal logits the first is the guess: id 0, end-of-text
    assert figures["accuracy"]["mean"] == pytest.approx(ends)
    assert figures["calibration_error"]["mean"] == pytest.approx(abs(ends - 1 / 320), abs=1e-8)
    assert report["protocols"]["non_overlapping"]["observations"]["clusters"] == 40
    assert report["text"]["name"] == "the whole text of data.source=files" and "the whole text" in stdout


def test_a_checkpoint_equals_itself_and_beats_a_uniform_model(trained):
    report, stdout = evaluated(trained, "ckpt=run", "other=run")
    for row in report["other_minus_checkpoint"]["non_overlapping"].values():
        assert row["other_is"] == "not distinguishable" and row["difference"]["mean"] == 0
    assert stdout.count("not distinguishable") == 2
    report, stdout = evaluated(trained, "ckpt=run", "other=uniform.ckpt")
    loss = report["protocols"]["non_overlapping"]["figures"]["loss"]["mean"]
    row = report["other_minus_checkpoint"]["non_overlapping"]["nats per token"]
    assert row["other_is"] == "higher" and row["difference"]["mean"] == pytest.approx(math.log(VOCAB) - loss, abs=1e-5)
    # The losses of the uniform model are constant, so the paired interval is as wide as that of one model.
    width = report["protocols"]["non_overlapping"]["figures"]["loss"]
    assert row["difference"]["high"] - row["difference"]["low"] == pytest.approx(width["high"] - width["low"], rel=1e-4)


def test_other_tokenizers_are_compared_in_bits_per_byte(trained):
    report, stdout = evaluated(
        trained, "ckpt=uniform.ckpt", "other=bytes.ckpt", "data=files", "data.path=docs", "part=all"
    )
    [(unit, row)] = report["other_minus_checkpoint"]["non_overlapping"].items()
    bits = [
        side["protocols"]["non_overlapping"]["targets"] * math.log2(size)
        for side, size in ((report, VOCAB), (report["other"], 320))
    ]
    assert unit == "bits per byte" and row["other_is"] == "higher"
    assert row["difference"]["mean"] == pytest.approx((bits[1] - bits[0]) / report["text"]["bytes"], abs=1e-6)
    assert row["difference"]["low"] < row["difference"]["mean"] < row["difference"]["high"]
    assert "\nother: bytes.ckpt\n" in stdout
    own, _ = evaluated(trained, "ckpt=run", "other=bytes.ckpt")  # the run's own validation part, in bytes
    assert own["other"]["text"]["bytes"] == own["text"]["bytes"]
    assert (
        own["other"]["text"]["tokens"]
        == own["text"]["bytes"] + own["protocols"]["non_overlapping"]["observations"]["documents"]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stride=33"], "stride=33 exceeds the context length of run/checkpoints/best.ckpt, 32; lower it"),
        (["other=bytes.ckpt", "stride=20"], "stride=20 exceeds the context length of bytes.ckpt, 12; lower it"),
        (["data=files", "data.path=docs", "data.tokenizer.kind=byte"], "data.tokenizer.kind=byte has no effect: the"),
        (["data=files", "data.path=docs", "+data.pth=x"], "there is no setting data.pth; did you mean data.path?"),
        (["ckpt=bytes.ckpt"], "config.yaml does not exist, so the data of bytes.ckpt are unknown; name a run's folder"),
        (
            ["other=bytes.ckpt", "data=files", "data.path=docs/1.txt", "part=all"],
            "have other tokenizers, so only the same documents can be paired, at least 10; they find 2 of",
        ),
    ],
)
def test_refusals(trained, arguments, message):
    before = set(trained.iterdir()) | {trained / "cache"}
    done = run(trained, *(["ckpt=run"] * (arguments[0][:4] != "ckpt")), *arguments, "out=none")
    assert_refused(done, message)
    assert set(trained.iterdir()) | {trained / "cache"} == before


def test_a_model_without_a_causal_mask_is_refused(trained, tmp_path):
    model = tiny_gpt(vocab_size=320, causal=False)
    save(tmp_path / "x.ckpt", LanguageModel(model, build(TokenizerConfig(kind="byte"), ())))
    done = run(tmp_path, "ckpt=x.ckpt", "data=files", f"data.path={trained / 'docs'}")
    assert_refused(done, "x.ckpt has model.causal=false, so its losses use the tokens that they predict; name a run")


def test_a_changed_text_is_refused(trained, tmp_path):
    shutil.copytree(trained / "run", tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        rewrite(path, lambda content: content["tril"]["data"].update(fingerprint="0123456789abcdef"))
    done = call(main, "ckpt=run", cwd=tmp_path, TRIL_CACHE=str(trained / "cache"))
    assert_refused(done, "instead of 0123456789ab); restore it, or train again")


@pytest.mark.parametrize(("settings", "eot"), [({}, None), ({"data.document_mask": True}, 9)])
def test_documents_are_separate_if_they_were_in_training(settings, eot):
    assert Subject(SimpleNamespace(settings=settings), SimpleNamespace(eot_id=9)).document_eot == eot
