"""A working directory with every file that the documented commands name."""

import json
import os
import shutil
from pathlib import Path
from unittest import mock

from tests.documented import ROOT
from tests.model.interop.folders import folder_of
from tests.model.interop.nanogpt_files import reference, write_checkpoint, write_meta
from tests.model.tokenizers import byte_tokenizer
from tests.runs import TINY, train_typed, typed
from tril.scripts.experiments.published import opened

RUN = Path("outputs/2026-11-20/12-00-00")  # of model=llama, which all scripts accept; it is the newest one
COPIES = ("outputs/2026-11-23/12-00-00", "outputs/0", "outputs/1", "base", "RUN", "checkpoint")
SIZES = ("model=llama", "model.n_layers=3", "model.dim=32", "model.n_heads=4", "model.n_kv_heads=2")
SHORT = ("data.val_fraction=0.5", "trainer.val_check_interval=8", "~callbacks.causality", "~callbacks.heads")
TEXTS = "text.txt my.txt before.txt code.txt input.txt FILE a.txt notes/a.md posts/b.txt".split()
TEXT = "".join(f"line {i}: the square of {i} is {i * i}.\n" for i in range(400))
FUNCTION = "import torch\n\n\ndef function(ids):\n    return torch.nn.functional.one_hot(ids, 65).float().cumsum(1)\n"
LSTM = """import torch


class LSTM(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(65, 16)
        self.lstm = torch.nn.LSTM(16, 16, batch_first=True)
        self.head = torch.nn.Linear(16, 65)

    def forward(self, ids):
        return self.head(self.lstm(self.embedding(ids))[0])


logits = LSTM()
"""


def write_files(folder: Path) -> None:
    """Texts, two runs and their copies, models of transformers and of nanoGPT, modules of others, and a sweep."""
    posts = [{"body": f"Post {i} is about {i * i}.\n" * 9} for i in range(60)]
    chats = [{"prompt": f"What is {i} plus 4?", "response": str(i + 4)} for i in range(200)]
    tables = {"posts.jsonl": posts, "FILE.jsonl": [{"good": "line 3", "bad": "enil 3"}], "chat.jsonl": chats}
    files = {name: f"{name}\n{TEXT}" for name in TEXTS} | {"start.txt": "line 3", "model.py": LSTM}
    files |= {name: "".join(f"{json.dumps(row)}\n" for row in rows) for name, rows in tables.items()}
    files |= {"package/module.py": FUNCTION, "tokenizer.json": byte_tokenizer().to_str()}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    with opened(ROOT / "docs" / "ablation_heads") as (sweep, _):
        shutil.copytree(sweep, folder / "multirun/DATE/TIME")  # older than the runs: `latest` is one of those
    for name, extra in ((RUN, []), (Path("RUN_WITHOUT_MASK"), ["experiment=control_no_mask"])):
        paths = [f"data.path={folder / 'text.txt'}", f"hydra.run.dir={folder / name}", "~callbacks.samples"]
        with mock.patch.dict(os.environ, {"TRIL_CACHE": str(folder / "cache")}):
            train_typed(typed(*TINY[:-1], *SIZES, *SHORT, *paths, *extra, base=[]))
    for name in COPIES:
        shutil.copytree(folder / RUN, folder / name)
    folder_of("SmolLM", folder / "FOLDER")
    characters = "\n !" + "".join(chr(i) for i in range(97, 123))
    write_checkpoint(folder / "out-shakespeare-char/ckpt.pt", reference(len(characters)))
    write_meta(folder / "out-shakespeare-char/meta.pkl", characters)
    write_checkpoint(folder / "out/ckpt.pt", reference(264))
    (folder / "nanoGPT").mkdir()
