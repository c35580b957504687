"""Wrong input for the other commands.

`tests/contract/bad_input.txt` has what users do most; here is each other kind of mistake once.
"""

import pytest

from tests.bad_input.conftest import name_of

REPORT = [
    ("dir=FILES/run", "FILES/run/config.yaml cannot be read (while parsing a flow node expected the node content,"),
    ("dir=a\nb", "a b is not a folder; name that of a sweep, such as multirun/DATE/TIME"),
    (("dir=FILES/folder", "margin=nan"), "margin=nan must be a finite number"),
    (("dir=FILES/folder", "out=a", "publish=b"), "out=a excludes publish=b; use one of them"),
    ("~dir", "dir is required"),
]

EVALUATE = [
    ("ckpt=FILES/tiny.ckpt", "FILES/config.yaml does not exist, so the data of FILES/tiny.ckpt are unknown; name a"),
    (("ckpt=FILES/tiny.ckpt", "data=files"), "data.path is missing; give a file, a folder or a glob, such as"),
    (("ckpt=FILES/tiny.ckpt", "data=prose", "data.tokenizer.kind=char"), "data.tokenizer.kind=char has no effect on"),
    (("ckpt=FILES/tiny.ckpt", "pairs=FILES/latin1.txt"), "pairs=FILES/latin1.txt is not UTF-8 (unexpected end of"),
    (("ckpt=FILES/tiny.ckpt", "pairs=FILES/text.txt"), "pairs=FILES/text.txt: line 1 must be {"),
    (("ckpt=FILES/tiny.ckpt", "pairs=FILES/text.txt", "limit=4"), "limit=4 has no effect without tasks; leave it out"),
    (("ckpt=FILES/tiny.ckpt", "pairs=FILES/text.txt", "data=prose"), "data=prose has no effect without pairs=null"),
    (("ckpt=FILES/tiny.ckpt", "data=files", "data.path=FILES/text.txt", "out=FILES/text.txt"), "cannot write to"),
    (("ckpt=FILES/tiny.ckpt", "data=nothing"), "there is no data=nothing; choose one of files, fineweb_edu, hub,"),
]

CERTIFY = [
    ("hf=FILES/tokenizer.json", "hf=FILES/tokenizer.json cannot be loaded: Unrecognized model in"),
    (("call=os:sep", "vocab_size=3", "context_length=4"), "call=os:sep is not callable on ids; name a function"),
    (("call=os:getcwd", "vocab_size=0", "context_length=4"), "vocab_size=0 must be an integer of at least 3"),
    ("context_length=3", "vocab_size, context_length, receptive_field go with call=...; of a fresh model set"),
    ("out=\u0000", "embedded null byte"),
    (("ckpt=FILES/tiny.ckpt", "model=nano"), "ckpt=FILES/tiny.ckpt and model=nano name several models; keep one"),
    (("call=not_there:f", "vocab_size=3", "context_length=4"), "call=not_there:f cannot be imported: No module named"),
    ("model=null", "Config group override must be a string or a list. Got NoneType"),
]

HEADS = [
    ("dir=FILES/text.txt", "FILES/text.txt is not a folder; name that of a sweep, such as multirun/DATE/TIME"),
    ("dir=FILES/folder", "FILES/folder holds neither a sweep.json with runs nor a run with config.yaml; name the"),
    (("dir=FILES/folder", "prompt=x"), "prompt=x is for one model, dir=FILES/folder for all of a sweep; give one of"),
    ("ckpt=FILES/list.ckpt", "FILES/config.yaml does not exist, so the data of FILES/list.ckpt are unknown; name a"),
]

REFEREE = [
    ("budget=1d", "budget=1d must be a time, such as 90s, 60m or 2h"),
    ("candidate=seed=1", "candidate: seed=1 cannot be set for an arm; set the first seed with seed=N, outside of the"),
    ("candidate=-m", "candidate: cannot read '-m'; settings are written key=value"),
    ("candidate=+ablation=heads", "candidate: +ablation=heads cannot be set for an arm; name one configuration"),
    ("candidate='model.dim=", 'cannot read candidate="\'model.dim=" (No closing quotation); close the quotes'),
    ("baseline=model.dim=[", "baseline: cannot read 'model.dim=['; put quotes within quotes, \"model.dim='...'\""),
    ("candidate=model.dim=32,64", "candidate: model.dim=32,64 has several values; add -m for a grid of runs, or"),
    ("common=trainer.max_steps=x", "baseline: trainer.max_steps='x' must be a valid integer"),
    ("candidate=model.n_head=3", "candidate: there is no setting model.n_head; did you mean model.n_heads?"),
]

SAMPLE = [
    ("ckpt=FILES/other.ckpt", "FILES/other.ckpt has no state_dict and tril entries; use a .ckpt file that train.py"),
    ("ckpt=\u0000", "\\x00 does not exist; name a checkpoint file, a run's folder or latest"),
    (("ckpt=FILES/tiny.ckpt", "stop=''"), "stop.0= must have at least 1 character"),
    (("ckpt=FILES/tiny.ckpt", "prompt=[1]"), "prompt.0=1 must be a valid string"),
    (("ckpt=FILES/tiny.ckpt", "remove_heads=[x]"), "the model has no head 'x'; with 2 layers of 4 heads, use L0H0 to"),
    (("ckpt=FILES/tiny.ckpt", "--nothing"), "--nothing: settings have no dashes; write nothing=VALUE"),
    (("ckpt=FILES/tiny.ckpt", "-m", "n=0"), "-m starts a grid of training runs, which sample cannot; leave"),
    (("ckpt=FILES/tiny.ckpt", "model=nano"), "there is no setting model; --help=all lists all"),
]

ROWS = {
    "report": REPORT,
    "evaluate": EVALUATE,
    "certify": CERTIFY,
    "heads": HEADS,
    "referee": REFEREE,
    "sample": SAMPLE,
}
CASES = [(command, *row) for command, rows in ROWS.items() for row in rows]


@pytest.mark.parametrize(("command", "arguments", "message"), CASES, ids=name_of)
def test_it_is_refused(refused, command, arguments, message):
    refused(command, arguments, message)
