"""Runs on conversations and on a mixture of texts: their losses against a loop over the targets, and how they go on."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
import yaml

from tests.calls import call
from tests.conftest import assert_refused
from tests.contract.harness import BARE, merged, metrics, roll_back, summary
from tests.data.chats import CHATML, MARKS
from tests.model.interop.folders import change_json, folder_of
from tests.model.tokenizers import byte_tokenizer
from tests.runs import in_process
from tril.data.config import parse
from tril.data.datamodule import TextDataModule
from tril.model.checkpoint import load, read_state
from tril.scripts import evaluate, heads

T = 32  # tokens of a window
BYTES = merged(BARE, "data.tokenizer.kind=byte", "hydra.run.dir=run")
CHAT = ("data.format=chat", "data.path=train.jsonl", "data.val_path=val.jsonl")


def train(cwd, *settings, base=BYTES):
    done = in_process(*merged(base, *settings), cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done


def run_on(cwd, script, *arguments):
    return call(script.main, *arguments, "device=cpu", cwd=cwd, TRIL_CACHE=str(cwd / "cache"))


def scored(lm, text, limit):
    """The losses of the targets in the first windows of a text, and the bytes, the window and the document of each."""
    ids, targets = text.tokens("val").astype(int), text.targets("val")
    windows = torch.nn.functional.pad(torch.from_numpy(ids), (0, -len(ids) % T)).view(-1, T)
    with torch.no_grad():
        log_p = lm.model(windows).double().log_softmax(-1).flatten(0, 1)
    at = [i for i in range(min(len(ids) - 1, limit * T)) if targets is None or targets[i + 1]]  # inputs of targets
    owners = text.documents("val")[at if targets is None else np.add(at, 1)]
    nats = np.array([-log_p[i, ids[i + 1]].item() for i in at])
    return nats, ids[np.add(at, 1)] != lm.eot_id, np.array(at) // T, owners


def in_units(nats, n_bytes):
    return pytest.approx([nats.mean(), nats.sum() / math.log(2) / n_bytes.sum()], rel=1e-5)


def validated(run, limit):
    """What the last validation of a run scored of each text, after a comparison with its losses and its windows."""
    lm, result, windows = load(run / "checkpoints/last.ckpt"), summary(run), np.load(run / "windows_last.npz")
    texts = parse(yaml.safe_load((run / "config.yaml").read_text())["data"]).prepare().texts
    parts = {name: scored(lm, text, limit) for name, text in texts.items()}
    nats, n_bytes, *_ = map(np.concatenate, zip(*parts.values(), strict=True))
    assert [result["final_val_loss"], result["final_val_bpb"]] == in_units(nats, n_bytes)
    assert windows["targets"].tolist() == [n for part in parts.values() for n in np.bincount(part[2]) if n]
    for name, weighted in (("document_targets", False), ("document_nll", True)):
        sums = [np.bincount(owners, nats if weighted else None) for nats, _, _, owners in parts.values()]
        assert windows[name].tolist() == pytest.approx(np.concatenate(sums).tolist(), rel=1e-4)
    return parts


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def conversations(tmp_path):
    """Of the validation, with two answers each; an answer and a question are longer than two windows."""
    found = []
    for i, answer in enumerate(["yes", "no, é", "x" * 70, "more", "less"]):
        texts = [f"question {i}" + "?" * (i == 3) * 70, answer, "and then", f"{answer}!"]
        found.append([{"role": ("user", "assistant")[j % 2], "content": text} for j, text in enumerate(texts)])
    (tmp_path / "val.jsonl").write_text("\n".join(json.dumps({"messages": messages}) for messages in found))
    rows = [{"prompt": f"{i} + {i}?", "response": f"{2 * i}"} for i in range(60)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


def test_a_run_on_conversations_is_scored_on_their_answers(tmp_path, conversations):
    """The validation ends within the last conversation, and has windows without targets."""
    train(tmp_path, *CHAT, "data.val_batch_size=16", "+trainer.limit_val_batches=1")
    [(_, n_bytes, windows, owners)] = validated(tmp_path / "run", limit=16).values()
    answers = [message["content"] for messages in conversations for message in messages[1::2]]
    sizes = [len(f" {answer}".encode()) for answer in answers]
    assert n_bytes.sum() == sum(sizes[:-1]) and len({*windows}) < 16 and {*owners} == {*range(5)}
    per_token = sum(sizes) / (sum(sizes) + len(sizes))  # with the tokens that end the answers
    assert summary(tmp_path / "run")["val_bytes_per_token"] == pytest.approx(per_token)
    for script in (evaluate, heads):
        assert_refused(run_on(tmp_path, script, "ckpt=run"), "was trained on the answers of conversations")


def test_the_chat_template_of_the_source_is_taken_over_unless_another_is_typed(tmp_path, conversations):
    """The run keeps it, so does a run that starts from that one, and a resumed run needs no source."""
    folder = folder_of("SmolLM", tmp_path / "hf")
    (folder / "tokenizer.json").write_text(byte_tokenizer(*MARKS).to_str())
    special = {"eos_token": "<|im_end|>", "bos_token": {"content": "<s>"}}
    change_json(folder / "tokenizer_config.json", chat_template=CHATML, **special)
    step = ("trainer.max_steps=1", "trainer.val_check_interval=1", "optim.schedule.warmup_steps=0")
    base = [word for word in BARE if not word.startswith(("model.", "data.tokenizer"))]

    def data_of(name, *settings):
        train(tmp_path, *CHAT, *step, f"hydra.run.dir={name}", *settings, base=base)
        data = read_state(tmp_path / name / "checkpoints/last.ckpt")["tril"]["data"]
        return data["counts"]["val"]["targets"], data["sources"][""]["source"]["chat_template"]

    targets, template = data_of("run", f"init_from=hf:{folder}")
    [file] = (tmp_path / "cache/taken_over").glob("*.jinja")
    expected = '{% set bos_token = "<s>" %}{% set eos_token = "<|im_end|>" %}' + CHATML
    assert file.read_text() == template == expected
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["data"]["chat_template"] == str(file)
    answers = [message["content"] for messages in conversations for message in messages[1::2]]
    assert targets == sum(len(answer.encode()) + 1 for answer in answers)  # bytes, and the token that ends the answer
    folder.rename(tmp_path / "gone")
    train(tmp_path, "resume=run", "trainer.max_steps=2", base=())
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    assert data_of("second", "init_from=run")[1] == expected
    assert data_of("third", "init_from=run", "data.chat_template=mine.jinja")[1].startswith("{% for m in messages %}[")


def test_a_run_on_a_mixture_has_the_losses_of_each_source_and_goes_on_with_the_same_shares_only(tmp_path):
    """Of 40 documents all validation windows are scored, of the other text 12."""
    (tmp_path / "docs").mkdir()
    for d in range(40):
        lines = (f"café {d}: line {i}, product {d * i}, sum {d + i}.\n" for i in range(4))
        (tmp_path / "docs" / f"{d}.txt").write_text("".join(lines), encoding="utf-8")
    (tmp_path / "other.txt").write_text("".join(f"{i}! The square of {i} is {i * i}\n" for i in range(600)))
    settings = ("data=mixture", "data.sources={docs: 0.75, other.txt: 0.25}", "data.val_batch_size=4")
    settings += ("data.batch_size=2", "trainer.accumulate_grad_batches=3", "trainer.val_check_interval=3")
    printed = train(tmp_path, *settings, "+trainer.limit_val_batches=3").stdout
    run, result = tmp_path / "run", summary(tmp_path / "run")
    parts = validated(run, limit=12)
    for name, share in (("docs", 0.75), ("other.txt", 0.25)):
        found = result["sources"][name]
        losses = [found["final_val_loss"], found["final_val_bpb"]]
        assert losses == [metrics(run, f"val/{name}/{key}")[8] for key in ("loss", "bpb")]
        assert losses == in_units(*parts[name][:2])
        epochs = 8 * 6 * T * share / found["training_tokens"]
        assert [found["share"], found["epochs"]] == pytest.approx([share, epochs])
    assert max(parts["docs"][2]) < 11 == max(parts["other.txt"][2]) and max(parts["docs"][3]) > 0
    data = TextDataModule(parse(yaml.safe_load((run / "config.yaml").read_text())["data"]), context_length=T)
    first = [text.tokens("val")[: 2 * T] for text in data.texts.values()]  # of each the same number of windows
    assert data.first_val_windows(4)[0].flatten().tolist() == np.concatenate(first).tolist()
    windows = result["val_windows"]
    assert f"on {windows['scored']} of {windows['of']} windows, not comparable with other runs" in printed

    refused = run_on(tmp_path, evaluate, "ckpt=run")
    assert_refused(refused, "a mixture has several texts; evaluate one of its sources, such as data=stdlib")
    checkpoint = "ckpt=run/checkpoints/last.ckpt"
    done = run_on(tmp_path, evaluate, checkpoint, "data=files", "data.path=docs", "out=out")
    assert done.returncode == 0, done.stderr
    loss = json.loads((tmp_path / "out/evaluation.json").read_text())["figures"]["loss"]["mean"]
    assert loss == pytest.approx(result["sources"]["docs"]["final_val_loss"], rel=1e-5)

    roll_back(shutil.copytree(run, tmp_path / "half"))
    saved = tmp_path / "half/config.yaml"
    original = saved.read_text()
    shares = "data.sources={'docs': 0.667, 'other.txt': 0.333} must be {'docs': 0.75, 'other.txt': 0.25}, as in "
    for old, new, refusal in (
        ("weight: 0.75", "weight: 0.5", shares),
        ("path: docs", "path: docs/1*", ") must be those of half/checkpoints/last.ckpt"),
    ):
        saved.write_text(original.replace(old, new))
        done = in_process("resume=half", cwd=tmp_path)
        assert done.returncode == 2 and refusal in done.stderr.splitlines()[-1], done
    saved.write_text(original.replace("weight: 0.75", "weight: 3").replace("weight: 0.25", "weight: 1"))
    train(tmp_path, "resume=half", base=())  # the same shares
    whole, half = (read_state(tmp_path / name / "checkpoints/last.ckpt") for name in ("run", "half"))
    assert whole["global_step"] == half["global_step"] == 8
    assert all(torch.equal(half["state_dict"][name], weight) for name, weight in whole["state_dict"].items())
    assert metrics(tmp_path / "half", "val/docs/loss") == metrics(run, "val/docs/loss")
