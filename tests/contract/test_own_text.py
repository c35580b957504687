"""Text of the user: tokens, split, masks and training windows (docs/data.md, docs/weights.md)."""

import hashlib
import random
import re
from collections import Counter
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from lightning.pytorch import Callback
from pandas import DataFrame
from tokenizers import Tokenizer

from tests.contract.harness import BARE, assert_golden, merged, run

RECORDED = (f"+callbacks.mine._target_={__name__}.Recorder",)
EOT = "<|endoftext|>"
WORDS = ["".join(random.Random(i).choices("bdfghklmnprstvz", k=8)) for i in range(20)]
TEXTS = [f'Über {word}: "日本", 🙂\r\n\r\n' + f" {word} {word}" * 20 + "\n" for word in WORDS]
DOCUMENTS = [*TEXTS, *TEXTS[::2]]  # copies must not be in both parts
KINDS = [".md", ".jsonl", "data.text_field=body .csv.gz"]


class Recorder(Callback):
    """Saves the inputs and targets of each batch in the folder of the run."""

    def on_train_batch_start(self, trainer, module, batch, index):
        self.save(trainer, f"train.{trainer.global_step:03}", batch)

    def on_validation_batch_start(self, trainer, module, batch, index, dataloader_idx=0):
        self.save(trainer, f"val.{index:03}", batch)

    def save(self, trainer, name, batch):
        np.save(f"{trainer.default_root_dir}/{name}", np.stack(batch[:2]))


def train(cwd, *rows, steps=2):
    """Trains with the settings of each row, in one process; returns the folder and the printed lines of each run."""
    cwd.mkdir(exist_ok=True)
    always = *BARE, *RECORDED, f"trainer.max_steps={steps}", f"trainer.val_check_interval={steps}"
    folders = [cwd / f"run{number}" for number in range(len(rows))]
    own = [(f"hydra.run.dir={folder}", f"data.cache_dir={folder}/cache") for folder in folders]
    commands = [merged(always, *places, *row) for places, row in zip(own, rows, strict=True)]
    ended = [run("train", *command, cwd=cwd).succeeded() for command in commands]
    return [(folder, done.stdout + done.stderr) for folder, done in zip(folders, ended, strict=True)]


def read(folder):
    """The tokens of a run, their encoder, and the inputs and targets of its windows, (2, n, T) of each part."""
    parts = ([np.load(path) for path in sorted(folder.glob(f"{part}.*.npy"))] for part in ("train", "val"))
    path, *_ = folder.rglob("tokens.bin")
    encode = partial(Tokenizer.from_file(str(path.with_name("tokenizer.json"))).encode, add_special_tokens=False)
    windows = [np.concatenate(part, axis=1) for part in parts]
    return np.fromfile(path, np.uint16), lambda text: tuple(encode(text).ids), windows


def split(ids, encode, windows):
    """The tokens of each document for training and, at the end of the file, for validation."""
    *found, rest = (tuple(x.tolist()) for x in np.split(ids, np.flatnonzero(ids == encode(EOT)) + 1))
    n_val = np.count_nonzero(windows[1][1] == encode(EOT))
    val = sum(found[-n_val:], ())
    assert rest == () and val[:-1] == tuple(windows[1][0].flat)[: len(val) - 1]
    return found[:-n_val], found[-n_val:]


def predicted(windows):
    """Counts the pairs of an input and its target."""
    inputs, targets = windows.reshape(2, -1).tolist()
    return Counter(pair for pair in zip(inputs, targets, strict=True) if pair[1] >= 0)


@pytest.fixture(scope="module")
def folder(once):
    """A folder with the documents as files, and as rows of tables."""

    def write(folder):
        for i, text in enumerate(DOCUMENTS):
            (folder / f"{i:02}.md").write_bytes(text.encode())
        table = DataFrame({"text": DOCUMENTS})
        table.to_json(folder / "rows.jsonl", orient="records", lines=True)
        table.rename(columns={"text": "body"}).to_csv(folder / "rows.csv.gz")

    return once("documents", write)


def test_each_document_is_in_one_part_and_the_tokenizer_knows_the_training_part_only(folder, tmp_path):
    sizes = "data.val_fraction=0.2", "data.tokenizer.vocab_size=700", "data.batch_size=200"
    rows = [(f"data.path={folder}/**/*{kind.split()[-1]}", *kind.split()[:-1], *sizes) for kind in KINDS]
    for kind, (result, _) in zip(KINDS, train(tmp_path, *rows), strict=True):
        ids, encode, windows = read(result)
        documents = {text: encode(text + EOT) for text in DOCUMENTS}
        parts = split(ids, encode, windows)
        assert Counter(sum(parts, [])) == Counter(documents[text] for text in DOCUMENTS), kind
        assert not set(parts[0]) & set(parts[1]), kind
        is_token = {text: len(encode(f" {word}")) == 1 for word, text in zip(WORDS, TEXTS, strict=True)}
        assert is_token == {text: documents[text] in parts[0] for text in TEXTS}, kind
        for part, found in zip(parts, windows, strict=True):
            tokens = sum(part, ())
            n_windows = -(-(len(tokens) - 1) // 32)  # of one epoch
            assert predicted(found[:, :n_windows]) == Counter(pairwise(tokens)), kind


def test_each_training_token_is_a_target_once_per_epoch_in_the_order_of_the_seed(tmp_path):
    text = "".join(random.Random(0).choices("abcdefgh \n", k=2550))  # 80 windows, 4 steps
    val = text[900:1665] + "".join(random.Random(0).choices("ijklmnop \n", k=1785))  # 30 % is a copy
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text(val)
    settings = "data.tokenizer.kind=byte", f"data.path={tmp_path}/*.txt", f"data.val_path={tmp_path}/b.txt"
    rows = [(*settings, f"seed={seed}", "data.batch_size=20") for seed in (0, 1)]
    orders = []
    for result, printed in train(tmp_path, *rows, steps=8):
        ids, encode, windows = read(result)
        assert ids.tolist() == [*encode(text + EOT), *encode(val + EOT)]
        assert any(29.9 < float(share) < 30.1 for share in re.findall(r"(\d+\.\d+) ?%", printed)), printed
        for epoch in np.split(windows[0], 2, axis=1):
            assert predicted(epoch) == Counter(pairwise(encode(text + EOT)))
            orders.append(hashlib.sha256(epoch.tobytes()).hexdigest())
    assert len(set(orders)) == len(orders)
    assert_golden("own_text", "windows", orders)
