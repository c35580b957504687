"""Runs on conversations: the chat template of the source, and commands that do not know conversations."""

import json

import yaml

from tests.calls import call
from tests.conftest import assert_refused
from tests.data.chats import CHATML, MARKS
from tests.model.interop.folders import change_json, folder_of
from tests.model.tokenizers import byte_tokenizer
from tests.runs import in_process
from tril.model.checkpoint import read_state
from tril.scripts import evaluate, heads

OFF = ("~callbacks.samples", "~callbacks.heads", "~callbacks.causality")
CHAT = ("data.format=chat", "data.path=train.jsonl", "data.val_path=val.jsonl", *OFF)


def test_the_chat_template_of_the_source_is_taken_over_unless_another_is_typed(tmp_path):
    """The run keeps it, so does a run that starts from that one, and a resumed run needs no source."""
    chats = [[{"role": role, "content": f"é, {i}"} for role in ("user", "assistant") * 2] for i in range(5)]
    (tmp_path / "val.jsonl").write_text("\n".join(json.dumps({"messages": messages}) for messages in chats))
    rows = [{"prompt": f"{i} + {i}?", "response": f"{2 * i}"} for i in range(60)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
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
    for main in (evaluate.main, heads.main):
        refused = call(main, "ckpt=run", "device=cpu", cwd=tmp_path, TRIL_CACHE=str(tmp_path / "cache"))
        assert_refused(refused, "was trained on the answers of conversations")
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    assert train("second", "init_from=run")[1] == expected
    assert train("third", "init_from=run", "data.chat_template=mine.jinja")[1].startswith("{% for m in messages %}[")
