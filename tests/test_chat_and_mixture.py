"""Runs on conversations and on a mixture of texts: their losses against a loop over the targets, and how they go on."""

import json
import math

import numpy as np
import pytest
import torch
import yaml

from tests.calls import call
from tests.conftest import assert_refused
from tests.contract.harness import BARE, merged, metrics, summary
from tests.data.chats import CHATML, MARKS
from tests.model.interop.folders import change_json, folder_of
from tests.model.tokenizers import byte_tokenizer
from tests.runs import in_process, rolled_back
from tril.data.config import parse
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


def nats_of(lm, ids) -> np.ndarray:
    """The loss of each token but the first, in windows that follow each other."""
    windows = torch.nn.functional.pad(torch.tensor(ids), (0, -len(ids) % T)).view(-1, T)
    with torch.no_grad():
        log_p = lm.model(windows).double().log_softmax(-1).flatten(0, 1)
    return np.array([-log_p[i, token].item() for i, token in enumerate(ids[1:])])


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
    """The validation ends within the last conversation."""
    limit = 16
    train(tmp_path, *CHAT, f"data.val_batch_size={limit}", "+trainer.limit_val_batches=1")
    run, ids, targets = tmp_path / "run", [], []
    lm = load(run / "checkpoints/last.ckpt")
    for number, messages in enumerate(conversations):
        for i in (0, 2):
            ids += lm.tokenizer.encode(f"User: {messages[i]['content']}\n\nAssistant:").ids
            reply = [*lm.tokenizer.encode(f" {messages[i + 1]['content']}").ids, lm.eot_id]
            targets += [(len(ids) + at - 1, number, token != lm.eot_id) for at, token in enumerate(reply)]
            ids += reply
    inputs, owners, is_byte = np.array([target for target in targets if target[0] < limit * T]).T
    assert set(owners) == {*range(5)} and len(inputs) < len(targets)
    nats, windows, result = nats_of(lm, ids)[inputs], np.load(run / "windows_last.npz"), summary(run)
    assert result["final_val_loss"] == pytest.approx(np.mean(nats), rel=1e-5)
    assert result["final_val_bpb"] == pytest.approx(nats.sum() / math.log(2) / is_byte.sum(), rel=1e-5)
    assert windows["document_targets"].tolist() == np.bincount(owners).tolist()
    assert windows["document_nll"].tolist() == pytest.approx(np.bincount(owners, nats).tolist(), rel=1e-4)
    counts = np.bincount(inputs // T)
    assert windows["targets"].tolist() == counts[counts > 0].tolist() and not counts.all()  # windows without targets
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


def test_a_run_on_a_mixture_has_the_losses_of_each_source_and_goes_on_with_the_same_shares_only(tmp_path, monkeypatch):
    """Of 40 documents all validation windows are scored, of the other text 12."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "docs").mkdir()
    for d in range(40):
        lines = (f"café {d}: line {i}, product {d * i}, sum {d + i}.\n" for i in range(4))
        (tmp_path / "docs" / f"{d}.txt").write_text("".join(lines), encoding="utf-8")
    (tmp_path / "other.txt").write_text("".join(f"{i}! The square of {i} is {i * i}\n" for i in range(600)))
    settings = ("data=mixture", "data.sources={docs: 0.75, other.txt: 0.25}")
    settings += ("data.batch_size=2", "trainer.accumulate_grad_batches=3", "trainer.val_check_interval=3")
    printed = train(tmp_path, *settings, "data.val_batch_size=4", "+trainer.limit_val_batches=3").stdout
    run, total, sizes, targets, documents = tmp_path / "run", [], [], [], []
    lm, result, windows = load(run / "checkpoints/last.ckpt"), summary(run), np.load(run / "windows_last.npz")
    texts = parse(yaml.safe_load((run / "config.yaml").read_text())["data"]).prepare().texts
    for name, share in (("docs", 0.75), ("other.txt", 0.25)):
        ids, n_train = texts[name].tokens("val").tolist(), texts[name].meta["counts"]["train"]["tokens"]
        nats = nats_of(lm, ids)[: 12 * T]
        n_bytes = sum(token != lm.eot_id for token in ids[1 : len(nats) + 1])
        found, key = result["sources"][name], f"val/{name}"
        losses = [found["final_val_loss"], found["final_val_bpb"]]
        assert losses == [metrics(run, f"{key}/loss")[8], metrics(run, f"{key}/bpb")[8]]
        assert losses == pytest.approx([np.mean(nats), nats.sum() / math.log(2) / n_bytes], rel=1e-5)
        assert [found["share"], found["epochs"]] == pytest.approx([share, 8 * 6 * T * share / n_train])
        total, targets = [*total, *nats], [*targets, *np.bincount(np.arange(len(nats)) // T)]
        documents += np.bincount(np.equal(ids[:-1], lm.eot_id).cumsum()[: len(nats)], nats).tolist()
        sizes.append(n_bytes)
    assert result["final_val_loss"] == metrics(run, "val/loss")[8] == pytest.approx(np.mean(total), rel=1e-5)
    assert result["final_val_bpb"] == pytest.approx(np.sum(total) / math.log(2) / sum(sizes), rel=1e-5)
    assert windows["targets"].tolist() == targets and T * 24 > sum(targets) > T * 12
    assert windows["document_nll"].tolist() == pytest.approx(documents, rel=1e-4) and len(documents) > 2
    scored = f"on {len(targets)} of {result['val_windows']['of']} windows, not comparable with other runs"
    assert scored in printed and len(targets) < result["val_windows"]["of"]

    refused = run_on(tmp_path, evaluate, "ckpt=run")
    assert_refused(refused, "a mixture has several texts; evaluate one of its sources, such as data=stdlib")
    checkpoint = "ckpt=run/checkpoints/last.ckpt"
    done = run_on(tmp_path, evaluate, checkpoint, "data=files", "data.path=docs", "out=out")
    assert done.returncode == 0, done.stderr
    loss = json.loads((tmp_path / "out/evaluation.json").read_text())["figures"]["loss"]["mean"]
    assert loss == pytest.approx(result["sources"]["docs"]["final_val_loss"], rel=1e-5)

    rolled_back(run, tmp_path / "half")
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
