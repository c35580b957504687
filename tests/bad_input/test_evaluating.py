"""Wrong input for evaluate.py and score.py."""

import pytest

from tests.bad_input.conftest import name_of

CKPT = "ckpt=FILES/tiny.ckpt"
OWN_TEXT = "FILES/config.yaml does not exist, so the data of FILES/tiny.ckpt are unknown; name"

EVALUATE = [
    ("ckpt=null", "ckpt=null must be a valid string"),
    ("ckpt=[]", "ckpt=[] must be a valid string"),
    ("ckpt=latest", "no checkpoint below outputs/ or multirun/ of CWD; train first, or name a file"),
    ("ckpt=FILES/folder", "FILES/folder contains no checkpoints/best.ckpt or checkpoints/last.ckpt; name a"),
    (CKPT, OWN_TEXT),
    (("ckpt=FILES/text.txt", "data=prose"), "FILES/text.txt is not a checkpoint, or is truncated"),
    (("ckpt=FILES/list.ckpt", "data=prose"), "FILES/list.ckpt"),
    ((CKPT, "other=nowhere"), "nowhere does not exist; name a checkpoint file, a run's folder or latest"),
    ((CKPT, "other=[]"), "other=[] must be a valid string"),
    ((CKPT, "part=train"), "part=train must be 'val' or 'all'"),
    ((CKPT, "part=all"), "part=all needs a text, such as data=files data.path=FILE; the run's own is part=val"),
    ((CKPT, "limit=1"), "limit=1 must be greater than or equal to 2"),
    ((CKPT, "limit=2.5"), "limit=2.5 must be a valid integer"),
    ((CKPT, "limit=true"), "limit=true must be a valid integer"),
    ((CKPT, "stride=0"), "stride=0 must be greater than or equal to 1"),
    ((CKPT, "stride=x"), "stride='x' must be a valid integer"),
    ((CKPT, "samples=-1"), "samples=-1 must be greater than or equal to 0"),
    ((CKPT, "samples=1001"), "samples=1001 must be less than or equal to 1000"),
    ((CKPT, "samples=null"), "samples=null must be a valid integer"),
    ((CKPT, "data=nothing"), "there is no data=nothing; choose one of files, fineweb_edu, mixture, prose, shakespeare"),
    ((CKPT, "data=files"), "data.path"),
    ((CKPT, "data=files", "data.path=FILES/nowhere"), "data.path=FILES/nowhere"),
    ((CKPT, "data=files", "data.path=FILES/text.txt", "data.val_fraction=2"), "data.val_fraction=2"),
    ((CKPT, "data=prose", "data.tokenizer.kind=char"), "data.tokenizer.kind=char has no effect: the checkpoint"),
    ((CKPT, "data=prose", "data.batch_size=4"), "data.batch_size=4 has no effect: the checkpoint decides it; leave"),
    ((CKPT, "pairs=FILES/nowhere"), "FILES/nowhere cannot be read (No such file or directory); name a text file"),
    ((CKPT, "pairs=FILES/folder"), "FILES/folder cannot be read (Is a directory); name a text file"),
    ((CKPT, "pairs=FILES/empty"), "pairs=FILES/empty holds no pair; each line must be {"),
    ((CKPT, "pairs=FILES/latin1.txt"), "pairs=FILES/latin1.txt is not UTF-8 (unexpected end of data); convert it"),
    ((CKPT, "pairs=FILES/text.txt"), "pairs=FILES/text.txt: line 1: not JSON; line 2: not JSON; line 3: not JSON"),
    ((CKPT, "pairs=FILES/text.txt", "limit=4"), "limit=4 has no effect with pairs=FILES/text.txt; leave one of them"),
    ((CKPT, "pairs=FILES/text.txt", "data=prose"), "data=... has no effect with pairs=FILES/text.txt; leave one"),
    ((CKPT, "pairs=FILES/text.txt", "other=x"), "other=x has no effect with pairs=FILES/text.txt; leave one of them"),
    ((CKPT, "device=tpu"), "device=tpu is not available; use auto, cpu"),
    ((CKPT, "data=files", "data.path=FILES/text.txt", "out=FILES/text.txt"), "cannot write to FILES/text.txt; choose"),
    ((CKPT, "out=[]"), "out=[] must be a valid string"),
    ((CKPT, "~part"), "part is missing"),
    ((CKPT, "strides=3"), "there is no setting strides; did you mean stride?"),
    ((CKPT, "-m"), "-m starts a grid of training runs, which python script.py cannot; leave it out"),
]

SCORE = [
    (CKPT, "text and path: exactly one of them must be set; use text=TEXT or path=FILE"),
    ((CKPT, "text=null", "path=null"), "text and path: exactly one of them must be set"),
    ((CKPT, "text=a", "path=FILES/text.txt"), "text and path: exactly one of them must be set"),
    ((CKPT, "text="), "text is empty; give at least one character"),
    ((CKPT, "text=[]"), "text=[] must be a valid string"),
    ((CKPT, "path=FILES/empty"), "path=FILES/empty is empty; give at least one character"),
    ((CKPT, "path=FILES/folder"), "FILES/folder cannot be read (Is a directory); name a text file"),
    ((CKPT, "path=FILES/nowhere"), "FILES/nowhere cannot be read (No such file or directory); name a text file"),
    ((CKPT, "path=FILES/binary"), "path=FILES/binary is not UTF-8 (invalid start byte); convert it first"),
    ((CKPT, "text=a", "stride=0"), "stride=0 must be greater than or equal to 1"),
    ((CKPT, "text=a", "stride=13"), "stride=13 exceeds the context length of FILES/tiny.ckpt, 12; lower it"),
    ((CKPT, "text=a", "device=3"), "device=3 must be a valid string"),
    ((CKPT, "text=a", "out=FILES/text.txt"), "cannot write to FILES/text.txt; choose another folder with out=FOLDER"),
    (("ckpt=latest", "text=a"), "no checkpoint below outputs/ or multirun/ of CWD; train first, or name a file"),
    (("ckpt=FILES/empty", "text=a"), "FILES/empty is not a checkpoint, or is truncated (File is not a zip file)"),
    ((CKPT, "text=a", "seed=1"), "there is no setting seed"),
    ((CKPT, "text=\x00", "path=\x00"), "text and path: exactly one of them must be set"),
    ((CKPT, "path=\x00"), "embedded null byte"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "message"), EVALUATE, ids=name_of)
def test_evaluate_refuses(refused, arguments, message):
    refused("evaluate", arguments, message)


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "message"), SCORE, ids=name_of)
def test_score_refuses(refused, arguments, message):
    refused("score", arguments, message)
