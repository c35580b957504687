"""evaluate.py on a tiny run: against the run's own validation, closed forms of a uniform model, and what it refuses."""

import json
import math
import shutil

import pytest
import torch

from tests import runs
from tests.calls import call
from tests.conftest import assert_refused, tiny_gpt
from tests.model.test_checkpoint import rewrite
from tril.data.tokenizer import TokenizerConfig, build
from tril.model.checkpoint import load, save
from tril.model.generation.language_model import LanguageModel
from tril.scripts.evaluate import main

VOCAB, T = 300, 12  # of the run; context length of tiny_gpt
SETTINGS = [
    "data.val_fraction=0.3",
    "trainer.max_steps=20",
    "trainer.val_check_interval=20",
    "trainer.log_every_n_steps=10",
]
BYTES = build(TokenizerConfig(kind="byte"), ())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory with a run on 40 documents, two uniform models, and a random one of bytes."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "docs").mkdir()
    for d in range(40):
        lines = (f"caf\u00e9 {d}: line {i}, product {d * i}, sum {d + i}.\n" for i in range(4))
        (folder / "docs" / f"{d}.txt").write_text("".join(lines), encoding="utf-8")
    done = runs.in_process(
        *runs.TINY, *SETTINGS, f"data.path={folder / 'docs'}", f"hydra.run.dir={folder / 'run'}", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    torch.manual_seed(0)
    save(folder / "random.ckpt", LanguageModel(tiny_gpt(vocab_size=320), BYTES))
    save(folder / "future.ckpt", LanguageModel(tiny_gpt(vocab_size=320, causal=False), BYTES))
    lm = load(folder / "run" / "checkpoints" / "last.ckpt")
    for name, size, tokenizer in (("uniform", VOCAB, lm.tokenizer), ("bytes", 320, BYTES)):
        model = tiny_gpt(vocab_size=size)
        torch.nn.init.zeros_(model.head.weight)
        save(folder / f"{name}.ckpt", LanguageModel(model, tokenizer))
    return folder


def run(folder, *arguments):
    return call(main, *arguments, cwd=folder, strict=True, TRIL_CACHE=str(folder / "cache"))


def evaluated(folder, *arguments, name="evaluation"):
    """The JSON file, and what was printed."""
    done = run(folder, *arguments, "out=out", "device=cpu")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (folder / "out").iterdir()] == [f"{name}.json"]
    text = (folder / "out" / f"{name}.json").read_text(encoding="utf-8")
    shutil.rmtree(folder / "out")
    return json.loads(text, parse_constant=pytest.fail), done.stdout


def test_the_figures_are_those_of_the_runs_own_validation(folder):
    report, stdout = evaluated(folder, "ckpt=run")
    summary = json.loads((folder / "run" / "summary.json").read_text())
    figures = {name: interval["mean"] for name, interval in report["figures"].items()}
    assert figures["loss"] == pytest.approx(summary["final_val_loss"], abs=5e-6)
    # A run divides by the bytes of the targets, evaluate.py by those of the text, which tokenizers have in common.
    bits = report["targets"] * figures["loss"] / math.log(2)
    assert bits / figures["bits_per_byte"] == pytest.approx(report["text"]["bytes"])
    first = report["text"]["bytes"] - bits / summary["final_val_bpb"]
    assert first == pytest.approx(round(first), abs=1e-2) and 1 <= round(first) < 20
    assert f"{figures['bits_per_byte']:.4f} [" in stdout and "the validation part of the run" in stdout
    assert [row["last"] for row in report["positions"]] == [1, 2, 4, 8, 16, 32]


def test_a_uniform_model_on_a_whole_text(folder):
    """Each target costs ln V; the bytes are those of the files."""
    report, stdout = evaluated(folder, "ckpt=bytes.ckpt", "data=files", "data.path=docs", "part=all")
    n_bytes = sum(path.stat().st_size for path in (folder / "docs").iterdir())
    n_targets = n_bytes + 40 - 1  # bytes, and the end of each text, but the first token
    assert (report["text"]["bytes"], report["targets"], report["windows"]) == (n_bytes, n_targets, -(-n_targets // T))
    figures = {name: interval["mean"] for name, interval in report["figures"].items()}
    assert figures["loss"] == pytest.approx(math.log(320), abs=1e-6)
    assert figures["bits_per_byte"] == pytest.approx(math.log2(320) * n_targets / n_bytes, abs=1e-6)
    assert figures["accuracy"] == pytest.approx(40 / n_targets)  # of equal logits the first is the guess: end-of-text
    assert report["observations"]["clusters"] == 40 and "the whole text of data.source=files" in stdout


def test_a_checkpoint_equals_itself_and_beats_a_uniform_model(folder):
    report, stdout = evaluated(folder, "ckpt=run", "other=run")
    for row in report["other_minus_checkpoint"].values():
        assert row["verdict"] == "not distinguishable" and row["difference"]["mean"] == 0
    assert stdout.count("not distinguishable") == 2
    report, _ = evaluated(folder, "ckpt=run", "other=uniform.ckpt")
    loss, row = report["figures"]["loss"], report["other_minus_checkpoint"]["nats per token"]
    assert row["verdict"] == "worse"
    assert row["difference"]["mean"] == pytest.approx(math.log(VOCAB) - loss["mean"], abs=1e-5)
    # The losses of the uniform model are constant, so the paired interval is as wide as that of one model.
    width = row["difference"]["high"] - row["difference"]["low"]
    assert width == pytest.approx(loss["high"] - loss["low"], rel=1e-4)


def test_other_tokenizers_are_compared_in_bits_per_byte(folder):
    report, stdout = evaluated(folder, "ckpt=run", "other=bytes.ckpt")  # the run's own validation part, in bytes
    other = report["other"]
    assert other["text"]["bytes"] == report["text"]["bytes"]
    assert other["text"]["tokens"] == report["text"]["bytes"] + report["observations"]["documents"]
    [(unit, row)] = report["other_minus_checkpoint"].items()
    bits = other["targets"] * math.log2(320) / report["text"]["bytes"]
    assert row["difference"]["mean"] == pytest.approx(bits - report["figures"]["bits_per_byte"]["mean"], abs=1e-5)
    assert unit == "bits per byte" and row["verdict"] == "worse" and "\nother: bytes.ckpt, " in stdout


def pair(good, bad, **others):
    return json.dumps({"good": good, "bad": bad} | others)


def test_minimal_pairs_are_scored_whole_after_end_of_text_and_ties_are_wrong(folder):
    lines = [pair("ab", "abc", field="syntax"), "", pair("abc", "ab"), pair("ab", "ba"), pair("x", "\u00e9")]
    (folder / "pairs.jsonl").write_text("\n".join([*lines, ""]), encoding="utf-8")
    found, stdout = evaluated(folder, "ckpt=bytes.ckpt", "pairs=pairs.jsonl", name="pairs")  # prefers shorter texts
    assert (found["pairs"], found["right"], found["ties"], found["accuracy"]["mean"]) == (4, 2, 1, 0.5)
    assert "accuracy 0.5000 [0.1500, 0.8500] (95 %, Wilson)" in stdout  # by the formula for 2 of 4
    texts, lm = [("one", "two"), ("a" * T, "b" * T), ("x<", "\u6f22")], load(folder / "random.ckpt")
    (folder / "pairs.jsonl").write_text("\n".join(pair(*texts[i % 3]) for i in range(70)))  # several batches
    found, _ = evaluated(folder, "ckpt=random.ckpt", "pairs=pairs.jsonl", name="pairs")
    for i, row in enumerate(found["nats"]):
        for key, text in zip(("good", "bad"), texts[i % 3], strict=True):
            ids = torch.tensor([lm.eot_id, *lm.tokenizer.encode(text).ids])
            with torch.no_grad():
                log_p = lm.model(ids[None, :-1])[0].double().log_softmax(-1)
            assert row[key] == pytest.approx(-log_p[range(len(ids) - 1), ids[1:]].sum().item(), abs=1e-3)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([pair("a", "b"), "", '{"good": "a"}'], "pairs=bad.jsonl: line 3 must be {"),
        (["[" * 100_000], "line 1 must be {"),
        (["", " "], "pairs=bad.jsonl holds no pair; each line must be {"),
        (
            [pair("a", "b"), pair("a" * (T + 1), "b")],
            "line 2 has a text of 13 tokens, more than the context length, 12",
        ),
    ],
)
def test_wrong_pairs_are_named(folder, lines, message):
    (folder / "bad.jsonl").write_text("\n".join(lines))
    assert_refused(run(folder, "ckpt=random.ckpt", "pairs=bad.jsonl"), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data=files", "data.path=docs", "data.tokenizer.kind=byte"], "data.tokenizer.kind=byte has no effect on"),
        (["data=files", "data.path=docs", "+data.pth=x"], "there is no setting data.pth; did you mean data.path?"),
        (["ckpt=bytes.ckpt"], "config.yaml does not exist, so the data of bytes.ckpt are unknown; name a run's folder"),
        (
            ["other=bytes.ckpt", "data=files", "data.path=docs/1.txt", "part=all"],
            "with other tokenizers only the same documents can be paired, at least 10; they find 2 of",
        ),
        (["ckpt=future.ckpt", "data=files", "data.path=docs"], "future.ckpt has model.causal=false, so its losses use"),
    ],
)
def test_refusals_leave_nothing(folder, arguments, message):
    before = set(folder.iterdir()) | {folder / "cache"}
    done = run(folder, *(["ckpt=run"] * (arguments[0][:4] != "ckpt")), *arguments, "out=none")
    assert_refused(done, message)
    assert set(folder.iterdir()) | {folder / "cache"} == before


def test_a_changed_text_is_refused(folder, tmp_path):
    shutil.copytree(folder / "run", tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        rewrite(path, lambda content: content["tril"]["data"].update(fingerprint="0123456789abcdef"))
    done = call(main, "ckpt=run", cwd=tmp_path, TRIL_CACHE=str(folder / "cache"))
    assert_refused(done, "instead of 0123456789ab); restore it, or train again")
