"""Runs on conversations: their losses against a loop over the answers, chat templates of the source, and refusals."""

import json
import math

import numpy as np
import pytest
import torch
import yaml

from tests.calls import call
from tests.conftest import assert_refused
from tests.data.sources.test_chat import CHATML, MARKS
from tests.model.interop.folders import byte_tokenizer, change_json, folder_of
from tests.runs import TINY, in_process
from tril.model.checkpoint import load, read_state

T = 32
CHAT = ["data.format=chat", "data.path=train.jsonl", "data.val_path=val.jsonl", "hydra.run.dir=run"]
BYTES = [
    "data.tokenizer.kind=byte",
    "data.tokenizer.vocab_size=null",
    "trainer.max_steps=4",
    "trainer.val_check_interval=4",
]


@pytest.fixture
def chats(tmp_path):
    """The validation conversations, with two answers each; an answer and a question are longer than two windows."""
    answers = ["yes", "no, é", "x" * 70, "more", "less"]
    found = []
    for i, answer in enumerate(answers):
        texts = [f"question {i}" + "?" * (i == 3) * 70, answer, "and then", f"{answer}!"]
        found.append([{"role": ("user", "assistant")[j % 2], "content": text} for j, text in enumerate(texts)])
    lines = [json.dumps({"messages": messages}) for messages in found]
    (tmp_path / "val.jsonl").write_text("\n".join(lines))
    rows = [{"prompt": f"{i} + {i}?", "response": f"{2 * i}"} for i in range(60)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


def answered(chats, lm):
    """All validation bytes as ids, and per target its position and its conversation."""
    tokenizer, ids, positions, owners = lm.tokenizer, [], [], []
    for number, messages in enumerate(chats):
        for i in (0, 2):
            ids += tokenizer.encode(f"User: {messages[i]['content']}\n\nAssistant:").ids
            reply = [*tokenizer.encode(f" {messages[i + 1]['content']}").ids, lm.eot_id]
            positions += range(len(ids), len(ids) + len(reply))
            owners += [number] * len(reply)
            ids += reply
    return ids, positions, owners


def losses(lm, ids, positions):
    """Nats of the token at each position, in non-overlapping windows, one at a time."""
    nats = []
    for position in positions:
        start = (position - 1) // T * T  # of the window that holds its input
        with torch.no_grad():
            log_p = lm.model(torch.tensor([ids[start : start + T]])).double().log_softmax(-1)
        nats.append(-log_p[0, position - 1 - start, ids[position]].item())
    return nats


def test_losses_bytes_and_conversations_of_a_run(tmp_path, chats):
    done = in_process(*TINY, *BYTES, *CHAT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run, summary = tmp_path / "run", json.loads((tmp_path / "run" / "summary.json").read_text())
    lm = load(run)
    ids, positions, owners = answered(chats, lm)
    nats = losses(lm, ids, positions)
    n_bytes = sum(len(f" {message['content']}".encode()) for each in chats for message in each[1::2])
    assert summary["final_val_loss"] == pytest.approx(np.mean(nats), rel=1e-5)
    assert summary["final_val_bpb"] == pytest.approx(sum(nats) / math.log(2) / n_bytes, rel=1e-5)
    assert f"({len(positions) + sum(len(str(2 * i)) + 2 for i in range(60)):,} of them in answers)" in done.stdout
    windows = np.load(run / "windows_last.npz")
    assert windows["document_targets"].tolist() == np.bincount(owners).tolist()
    assert windows["document_nll"].tolist() == pytest.approx(np.bincount(owners, nats).tolist(), rel=1e-4)
    counts = np.bincount((np.array(positions) - 1) // T)
    assert windows["targets"].tolist() == counts[counts > 0].tolist() and not counts.all()  # windows without targets

    from tril.scripts.evaluate import main as evaluate
    from tril.scripts.heads import main as heads

    for main in (evaluate, heads):
        refused = call(main, "ckpt=run", "device=cpu", cwd=tmp_path, TRIL_CACHE=str(tmp_path / "cache"))
        assert refused.returncode == 2 and "was trained on the answers of conversations" in refused.stderr
    refused = call(evaluate, "ckpt=run", "data=files", "data.format=chat", "data.path=val.jsonl", cwd=tmp_path)
    assert refused.returncode == 2 and "data.format=chat has no effect on whole texts" in refused.stderr
    (tmp_path / "text.txt").write_text("another text, as a whole\n" * 40)
    scored = call(evaluate, "ckpt=run", "data=files", "data.path=text.txt", "device=cpu", cwd=tmp_path)
    assert scored.returncode == 0, scored.stderr


def test_some_validation_batches_count_their_own_bytes(tmp_path, chats):
    """Four windows of 32 hold the first answers only."""
    limited = ["data.val_batch_size=4", "+trainer.limit_val_batches=1"]
    assert in_process(*TINY, *BYTES, *CHAT, *limited, cwd=tmp_path).returncode == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    lm = load(tmp_path / "run")
    ids, positions, _ = answered(chats, lm)
    read_positions = [position for position in positions if position <= 4 * T]
    n_bytes = sum(ids[position] != lm.eot_id for position in read_positions)
    nats = losses(lm, ids, read_positions)
    assert 0 < len(read_positions) < len(positions)
    assert summary["final_val_bpb"] == pytest.approx(sum(nats) / math.log(2) / n_bytes, rel=1e-5)


@pytest.fixture
def hf(tmp_path):
    folder = folder_of("SmolLM", tmp_path / "hf")
    (folder / "tokenizer.json").write_text(byte_tokenizer(*MARKS).to_str())
    special = {"eos_token": "<|im_end|>", "bos_token": {"content": "<s>"}}
    change_json(folder / "tokenizer_config.json", chat_template=CHATML, **special)
    return folder


HF = ["data=files", *CHAT, "trainer.max_steps=2", "trainer.val_check_interval=2", "trainer.accelerator=cpu"]
HF += ["optim.schedule.warmup_steps=1", "callbacks.samples.max_new_tokens=4", "data.batch_size=4"]


@pytest.mark.slow
def test_the_chat_template_of_the_source_is_taken_over(tmp_path, chats, hf):
    """The run keeps it, so does a run that starts from that one, and a resumed run needs no source."""
    done = in_process(*HF, f"init_from=hf:{hf}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    [file] = (tmp_path / "cache" / "taken_over").glob("*.jinja")
    expected = '{% set bos_token = "<s>" %}{% set eos_token = "<|im_end|>" %}' + CHATML
    assert file.read_text() == expected
    settings = yaml.safe_load((run / "config.yaml").read_text())
    assert settings["data"]["chat_template"] == str(file)
    data = read_state(run / "checkpoints" / "last.ckpt")["tril"]["data"]
    assert data["sources"][""]["source"]["chat_template"] == expected
    marked = sum(len(message["content"].encode()) + 1 for each in chats for message in each[1::2])
    assert data["counts"]["val"]["targets"] == marked  # bytes, and the token that ends the answer
    hf.rename(tmp_path / "gone")
    done = in_process("resume=run", "trainer.max_steps=4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = in_process(*HF[:4], "hydra.run.dir=second", *HF[5:], "init_from=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    data = read_state(tmp_path / "second" / "checkpoints" / "last.ckpt")["tril"]["data"]
    assert data["sources"][""]["source"]["chat_template"] == expected


@pytest.mark.slow
def test_a_chosen_template_goes_before_that_of_the_source(tmp_path, chats, hf):
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    refused = in_process(*HF, f"init_from=hf:{hf}", "data.chat_template=mine.jinja", cwd=tmp_path)
    assert refused.returncode == 0 and not list((tmp_path / "cache" / "taken_over").glob("*.jinja"))
    data = read_state(tmp_path / "run" / "checkpoints" / "last.ckpt")["tril"]["data"]
    assert data["sources"][""]["source"]["chat_template"].startswith("{% for m in messages %}[")


def test_a_refused_run_leaves_nothing(tmp_path, chats, hf):
    (tmp_path / "val.jsonl").write_text(json.dumps({"prompt": "a", "response": ""}))
    refused = in_process(*HF, f"init_from=hf:{hf}", cwd=tmp_path)
    assert_refused(refused, "messages[1].content must be a text and not empty; write prompt and response, or ")
    assert not (tmp_path / "run").exists()
