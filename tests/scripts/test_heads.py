"""scripts/heads.py end to end on a tiny run that train.py made, with separate documents; and what it refuses."""

import csv
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.calls import call
from tests.conftest import assert_refused, tiny_gpt
from tests.model.generation.test_language_model import with_gaps
from tests.model.test_checkpoint import language_model, rewrite
from tests.runs import train_typed, typed
from tril.model.checkpoint import read_state, save
from tril.model.generation.language_model import LanguageModel
from tril.model.heads.ablation import obstacle
from tril.model.heads.attention_maps import TokenWindows
from tril.model.heads.gate import head_gate
from tril.model.heads.scores import HeadScores
from tril.model.intervals import clustered_mean
from tril.scripts.cli.finished_run import read_run, sample_windows, validation_tokens
from tril.scripts.heads import alphabet, main, prompt_ids, write_maps

T = 32  # context length of tests.runs.TINY, which has 2 layers of 2 heads
NAMES = ["L0H0", "L0H1", "L1H0", "L1H1"]
WRITTEN = [f"heads.{kind}" for kind in ("json", "csv", "png")] + ["removal.csv", "removal.png"]
WRITTEN += ["attention.png", "attention.html"]
WINDOW = torch.zeros(1, 1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A working directory with one run below outputs/, on documents of some twenty tokens."""
    folder = tmp_path_factory.mktemp("heads")
    lines = [json.dumps({"text": f"line {i}: the square of {i} is {i * i}."}) for i in range(2000)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    steps = ["trainer.max_steps=30", "trainer.val_check_interval=30"]
    output = f"hydra.run.dir={folder / 'outputs' / 'run'}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIL_CACHE", str(folder / "cache"))
        train_typed(typed(f"data.path={folder / 'text.jsonl'}", output, *steps, "data.document_mask=true"))
        yield folder


@pytest.fixture
def run(trained):
    return read_run(trained / "outputs" / "run" / "checkpoints" / "best.ckpt")


@pytest.fixture
def lm(run):
    return run.checkpoint.language_model()


def heads(folder, *arguments):
    return call(main, *arguments, cwd=folder, strict=True)


def document_losses(lm, tokens, numbers, gate=None):
    """Document -> [sum of its losses in the windows in nats, number of them]; each passes the model by itself."""
    sums, eot = {}, lm.tokenizer.token_to_id(lm.eot)
    for number in numbers:
        window = tokens[number * T : number * T + T + 1]
        starts = sorted({0, *(i for i in range(T) if window[i] == eot)})
        for start, end in zip(starts, [*starts[1:], T], strict=True):
            with torch.no_grad():
                logits = lm.model(window[None, start:end], head_gate=gate)[0]
            loss = F.cross_entropy(logits.double(), window[start + 1 : end + 1], reduction="sum").item()
            entry = sums.setdefault((tokens[: number * T + start + 1] == eot).sum().item(), [0.0, 0])
            entry[:] = entry[0] + loss, entry[1] + end - start
    return sums


def mean_loss(lm, tokens, numbers, gate=None):
    """Of the windows, in nats."""
    nll, targets = np.sum(list(document_losses(lm, tokens, numbers, gate).values()), axis=0)
    assert targets == len(numbers) * T
    return nll / targets


def test_heads_end_to_end(trained, run, lm):
    before = set(trained.rglob("*"))
    result = heads(trained, "windows=10", "device=cpu")
    assert result.returncode == 0, result.stderr
    out = trained / "outputs" / "run" / "heads"
    assert set(trained.rglob("*")) - before == {out, *(out / name for name in WRITTEN)}
    assert len(result.stderr.splitlines()) == 2  # progress, and no warnings
    assert result.stdout.endswith(
        f"{Path('outputs/run/heads')}: {', '.join(sorted(WRITTEN, key=result.stdout.index))}\n"
    )
    assert all((out / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in ("heads", "removal", "attention"))

    [tokens] = validation_tokens(run)
    content, tokens = json.loads((out / "heads.json").read_text()), torch.tensor(tokens.astype(int))
    last = (len(tokens) - 1) // T - 1
    numbers = [i * last // 9 for i in range(10)]
    assert content["windows"] == {"of": "the validation part", "length": T, "numbers": numbers}
    assert (content["document_mask"], content["steps"], content["checkpoint"]) == (
        True,
        30,
        str(Path("outputs/run/checkpoints/best.ckpt")),
    )
    whole = mean_loss(lm, tokens, numbers)
    assert content["loss"] == pytest.approx(whole, abs=1e-5)
    assert [row["head"] for row in content["heads"]] == NAMES
    for row in content["heads"]:
        without = mean_loss(lm, tokens, numbers, head_gate(lm.config, [row["head"]]))
        assert row["change"] == pytest.approx(without - whole, abs=1e-5)
        pairs = [document_losses(lm, tokens, numbers, gate) for gate in (head_gate(lm.config, [row["head"]]), None)]
        rises = [with_sum - sum_ for (with_sum, _), (sum_, _) in zip(*(pair.values() for pair in pairs), strict=True)]
        expected = clustered_mean(rises, [targets for _, targets in pairs[1].values()])
        half = expected.interval(1 - 0.05 / len(NAMES)).half_width
        assert (row["high"] - row["low"]) / 2 == pytest.approx(half, rel=1e-2)
        assert content["observations"] == {
            **{"unit": "documents", "documents": len(rises), "clusters": len(rises)},
            "df": pytest.approx(expected.df),
        }
        assert f"| {row['head']} |" in result.stdout and f"{row['change']:+.4f} ±" in result.stdout
    assert "This describes one trained model on one text, not its configuration" in result.stdout
    assert f"over {len(rises)} documents, {expected.df:.1f} degrees of freedom" in result.stdout
    assert content["describes"] in result.stdout
    nothing = mean_loss(lm, tokens, numbers, torch.zeros(2, 2))
    assert content["removal"][-1]["loss"] == pytest.approx(nothing, abs=1e-5)
    ranked = sorted(content["heads"], key=lambda row: row["change"])
    assert [row["removed_last"] for row in content["removal"]] == [None, *(row["head"] for row in ranked)]

    rows = list(csv.DictReader((out / "heads.csv").open()))
    assert [row["head"] for row in rows] == [*NAMES, "uniform"]
    for row, head in zip(rows[:-1], content["heads"], strict=True):
        assert float(row["high"]) == head["high"] and float(row["induction"]) == head["induction"]
        assert row["verdict"] == head["verdict"]
        assert int(row["documents"]) == len(rises)
    assert float(rows[-1]["entropy"]) == content["uniform"]["entropy"] and rows[-1]["change"] == ""
    removal = list(csv.DictReader((out / "removal.csv").open()))
    assert [int(row["n_removed"]) for row in removal] == list(range(5))
    assert [float(row["loss"]) for row in removal] == [row["loss"] for row in content["removal"]]
    assert "".join(content["shown_tokens"]) == lm.tokenizer.decode(tokens[:T].tolist(), skip_special_tokens=False)
    assert "Attention of outputs/run/checkpoints/best.ckpt" in (out / "attention.html").read_text(encoding="utf-8")


def test_the_maps_of_a_prompt(lm, tmp_path, monkeypatch):
    pages = []
    monkeypatch.setattr("tril.model.heads.page.write_page", lambda path, **page: pages.append((path, page)))
    ids = prompt_ids(lm, None, "line 3 é")
    text = TokenWindows(WINDOW, WINDOW)
    entropy = torch.tensor([[0.0, 0.25], [0.5, 1.0]])
    write_maps(tmp_path, lm, ids, text, "it", HeadScores({"entropy_share": entropy}, {}, 1))
    assert (tmp_path / "attention.png").is_file()
    [(path, page)] = pages
    assert path == tmp_path / "attention.html" and page["title"] == "Attention of it"
    assert (
        "".join(page["tokens"][:-2]) == "line 3 " and page["tokens"][-2:] == ["\ufffd"] * 2
    )  # a character of two tokens
    assert page["maps"].shape == (2, 2, len(ids), len(ids))
    meaning = "share of the entropy of uniform weights; mean over the validation windows"
    assert page["scores"] == {"entropy share": (meaning, entropy)}
    with torch.no_grad():
        probabilities = lm.model(torch.tensor([ids]))[0].softmax(-1)
    for expected, row in zip(probabilities, page["probabilities"], strict=True):
        top = expected.argsort(descending=True)[:10]
        assert [token for token, _ in row] == [
            lm.tokenizer.decode([i], skip_special_tokens=False) for i in top.tolist()
        ]
        assert [p for _, p in row] == pytest.approx(expected[top].tolist(), abs=1e-6)


def test_the_maps_keep_documents_apart_as_the_run_did(lm, tmp_path, monkeypatch):
    pages = []
    monkeypatch.setattr("tril.model.heads.page.write_page", lambda path, **page: pages.append(page))
    eot = lm.tokenizer.token_to_id(lm.eot)
    for document_eot in (None, eot):
        write_maps(
            tmp_path, lm, [5, 6, eot, 7], TokenWindows(WINDOW, WINDOW, document_eot), "it", HeadScores({}, {}, 1)
        )
    assert pages[0]["tokens"][2] == "<|endoftext|>"
    across = [page["maps"][:, :, 2:, :2] for page in pages]
    assert (across[0] > 0).all() and (across[1] == 0).all()
    with torch.no_grad():
        expected = lm.model(torch.tensor([[eot, 7]]))[0, -1].softmax(-1).max().item()
    assert pages[1]["probabilities"][3][0][1] == pytest.approx(expected, abs=1e-6)


def test_prompts(lm):
    tokens = torch.arange(100).numpy()
    assert prompt_ids(lm, tokens, None) == list(range(T))  # no more than the context
    assert prompt_ids(LanguageModel(tiny_gpt(vocab_size=300, context_length=60), lm.tokenizer), tokens, None) == list(
        range(48)
    )
    assert prompt_ids(lm, tokens, "") == [lm.tokenizer.token_to_id(lm.eot)]
    assert lm.tokenizer.decode(prompt_ids(lm, tokens, "a square")) == "a square"
    with pytest.raises(ValueError, match="prompt has 40 tokens, more than the model's context_length=32; shorten it"):
        prompt_ids(lm, tokens, "é" * 20)


def test_random_sequences_have_no_end_of_text():
    lm = language_model(vocab_size=300)  # 43 rows more than tokens
    assert alphabet(lm).tolist() == [i for i in range(257) if i != lm.tokenizer.token_to_id(lm.eot)]
    assert alphabet(LanguageModel(tiny_gpt(vocab_size=301), with_gaps())).tolist() == [
        *range(256),
        290,
    ]  # end-of-text is 300


def test_the_maps_know_all_ids_of_a_tokenizer_with_gaps(tmp_path, monkeypatch):
    pages = []
    monkeypatch.setattr("tril.model.heads.page.write_page", lambda path, **page: pages.append(page))
    lm = LanguageModel(tiny_gpt(vocab_size=320, tie_embeddings=False), with_gaps())
    with torch.no_grad():
        logits = lm.model(torch.tensor([[65, 66]]))[0, :, :301]
    lm.model.head.weight.data[300] = (
        50 * lm.model.head.weight.data[logits[1].argmax()]
    )  # end-of-text is the most probable
    write_maps(tmp_path, lm, [65, 66], TokenWindows(WINDOW, WINDOW), "it", HeadScores({}, {}, 1))
    assert pages[0]["probabilities"][1][0] == ("<|endoftext|>", pytest.approx(1))


def test_documents_are_kept_apart_where_the_run_kept_them_apart(run):
    texts = validation_tokens(run)
    kept = [sample_windows(each, texts, 3)[1].document_eot for each in (run, replace(run, data={}))]
    assert kept == [run.checkpoint.data["eot_id"], None]


def test_a_model_without_heads_is_refused_in_one_line(trained, tmp_path, lm):
    path = tmp_path / "checkpoints" / "last.ckpt"
    without = LanguageModel(tiny_gpt(vocab_size=300, context_length=T, n_heads=0), lm.tokenizer)
    save(path, without, **read_state(trained / "outputs" / "run" / "checkpoints" / "last.ckpt")["tril"]["data"])
    shutil.copy(trained / "outputs" / "run" / "config.yaml", tmp_path)
    assert_refused(
        heads(tmp_path, "ckpt=."), "last.ckpt has model.n_heads=0, blocks without attention heads; name another run"
    )
    assert not (tmp_path / "heads").exists()


def test_other_refusals_are_one_line_and_leave_nothing(trained, tmp_path):
    checkpoint = trained / "outputs" / "run" / "checkpoints" / "best.ckpt"
    assert_refused(heads(tmp_path), "no checkpoint below outputs/")
    long = f"prompt={'print(x, ' * 9}"
    assert_refused(
        heads(tmp_path, f"ckpt={checkpoint}", "windows=4", long), "more than the model's context_length=32; shorten it"
    )
    assert_refused(
        heads(tmp_path, f"ckpt={checkpoint}", "windows=9999", "out=here"),
        "whole windows of 32 tokens in the validation part",
    )
    assert not list(tmp_path.iterdir())


def test_a_diverged_model_is_refused(trained, tmp_path):
    assert obstacle(tiny_gpt()) is None
    shutil.copytree(trained / "outputs" / "run", tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "best.ckpt"
    rewrite(path, lambda content: content["state_dict"]["model.norm.weight"].fill_(math.nan))
    message = "best.ckpt has weights that are not finite, as its run diverged; name another run"
    assert_refused(heads(tmp_path, "ckpt=run"), message)
