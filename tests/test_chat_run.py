"""Runs on conversations: their losses against a loop over the answers, and chat templates of the source."""

import json
import math

import numpy as np
import pytest
import torch
import yaml

from tests.calls import call
from tests.conftest import assert_refused
from tests.data.chats import CHATML, MARKS
from tests.model.interop.folders import change_json, folder_of
from tests.model.tokenizers import byte_tokenizer
from tests.runs import TINY, in_process
from tril.model.checkpoint import load, read_state
from tril.scripts import evaluate, heads

T = 32
OFF = ("~callbacks.samples", "~callbacks.heads", "~callbacks.causality")
CHAT = ("data.format=chat", "data.path=train.jsonl", "data.val_path=val.jsonl", *OFF)
BYTES = (*TINY[:1], *TINY[2:-1], "data.tokenizer.kind=byte", "trainer.max_steps=4")


@pytest.fixture
def chats(tmp_path):
    """The validation conversations, with two answers each; an answer and a question are longer than two windows."""
    conversations = []
    for i, answer in enumerate(["yes", "no, é", "x" * 70, "more", "less"]):
        texts = [f"question {i}" + "?" * (i == 3) * 70, answer, "and then", f"{answer}!"]
        conversations.append([{"role": ("user", "assistant")[j % 2], "content": text} for j, text in enumerate(texts)])
    (tmp_path / "val.jsonl").write_text("\n".join(json.dumps({"messages": messages}) for messages in conversations))
    rows = [{"prompt": f"{i} + {i}?", "response": f"{2 * i}"} for i in range(60)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return conversations


def losses_by_hand(chats, lm):
    """The position of each target, its conversation, its bytes and its loss in nats, in windows that do not overlap."""
    ids, targets = [], []
    for number, messages in enumerate(chats):
        for i in (0, 2):
            ids += lm.tokenizer.encode(f"User: {messages[i]['content']}\n\nAssistant:").ids
            reply = [*lm.tokenizer.encode(f" {messages[i + 1]['content']}").ids, lm.eot_id]
            targets += [(len(ids) + at, number, token != lm.eot_id) for at, token in enumerate(reply)]
            ids += reply
    nats = []
    for position, *_ in targets:
        start = (position - 1) // T * T  # of the window that holds its input
        with torch.no_grad():
            log_p = lm.model(torch.tensor([ids[start : start + T]])).double().log_softmax(-1)
        nats.append(-log_p[0, position - 1 - start, ids[position]].item())
    return *np.array(targets).T, np.array(nats)


@pytest.mark.parametrize("limit", [None, 4 * T])
def test_losses_bytes_and_conversations_of_a_run(tmp_path, chats, limit):
    """Of all windows, or of four, which hold the first answers only."""
    limited = ["data.val_batch_size=4", "+trainer.limit_val_batches=1"] if limit else []
    done = in_process(*BYTES, *CHAT, "hydra.run.dir=run", *limited, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run, summary = tmp_path / "run", json.loads((tmp_path / "run/summary.json").read_text())
    positions, owners, is_byte, nats = losses_by_hand(chats, load(run))
    scored = positions <= (limit or 10**9)
    bpb = nats[scored].sum() / math.log(2) / is_byte[scored].sum()
    assert summary["final_val_bpb"] == pytest.approx(bpb, rel=1e-5) and 0 < scored.sum()
    if limit:
        assert scored.sum() < len(scored)
        return
    assert summary["final_val_loss"] == pytest.approx(np.mean(nats), rel=1e-5)
    windows = np.load(run / "windows_last.npz")
    assert windows["document_targets"].tolist() == np.bincount(owners).tolist()
    assert windows["document_nll"].tolist() == pytest.approx(np.bincount(owners, nats).tolist(), rel=1e-4)
    counts = np.bincount((positions - 1) // T)
    assert windows["targets"].tolist() == counts[counts > 0].tolist() and not counts.all()  # windows without targets
    for main in (evaluate.main, heads.main):
        refused = call(main, "ckpt=run", "device=cpu", cwd=tmp_path, TRIL_CACHE=str(tmp_path / "cache"))
        assert_refused(refused, "was trained on the answers of conversations")


def test_the_chat_template_of_the_source_is_taken_over_unless_another_is_typed(tmp_path, chats):
    """The run keeps it, so does a run that starts from that one, and a resumed run needs no source."""
    folder = folder_of("SmolLM", tmp_path / "hf")
    (folder / "tokenizer.json").write_text(byte_tokenizer(*MARKS).to_str())
    special = {"eos_token": "<|im_end|>", "bos_token": {"content": "<s>"}}
    change_json(folder / "tokenizer_config.json", chat_template=CHATML, **special)
    steps = ("data=files", "trainer.max_steps=2", "trainer.val_check_interval=2", "trainer.accelerator=cpu")

    def train(name, *settings):
        sizes = ("optim.schedule.warmup_steps=1", "data.batch_size=4", f"hydra.run.dir={name}")
        done = in_process(*CHAT, *steps, *sizes, *settings, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        data = read_state(tmp_path / name / "checkpoints/last.ckpt")["tril"]["data"]
        return data["counts"]["val"]["targets"], data["sources"][""]["source"]["chat_template"]

    targets, template = train("run", f"init_from=hf:{folder}")
    [file] = (tmp_path / "cache/taken_over").glob("*.jinja")
    expected = '{% set bos_token = "<s>" %}{% set eos_token = "<|im_end|>" %}' + CHATML
    assert file.read_text() == template == expected
    settings = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert settings["data"]["chat_template"] == str(file)
    marked = sum(len(message["content"].encode()) + 1 for each in chats for message in each[1::2])
    assert targets == marked  # bytes, and the token that ends the answer
    folder.rename(tmp_path / "gone")
    assert in_process("resume=run", "trainer.max_steps=4", cwd=tmp_path).returncode == 0
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    assert train("second", "init_from=run")[1] == expected
    assert train("third", "init_from=run", "data.chat_template=mine.jinja")[1].startswith("{% for m in messages %}[")
