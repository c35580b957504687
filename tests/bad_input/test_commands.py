"""Wrong input for the other commands.

`tests/contract/bad_input.txt` has what users do most; here is each other kind of mistake once.
"""

import pytest

from tests.bad_input.conftest import name_of

SCALING = [
    ("dir=FILES/folder", "FILES/folder holds neither a sweep.json with runs nor a run with config.yaml; name the"),
    ("dir=FILES/text.txt", "FILES/text.txt is not a readable runs.tar.xz of a published report (Input format not"),
    ("dir=\u0000", "\\x00 is not a folder; name that of a sweep, such as multirun/DATE/TIME"),
    (("dir=FILES/folder", "size=tokens"), "size=tokens must be 'parameters_without_embeddings' or 'parameters'"),
    (("dir=FILES/folder", "predict.parameters=[0]"), "predict.parameters.0=0 must be greater than 0"),
    (("dir=FILES/folder", "predict.flops={}"), "Error merging override predict.flops={}"),
]

REPORT = [
    ("dir=FILES/run", "FILES/run/config.yaml cannot be read (while parsing a flow node expected the node content,"),
    ("dir=a\nb", "a b is not a folder; name that of a sweep, such as multirun/DATE/TIME"),
    (("dir=FILES/folder", "margin=nan"), "margin=nan must be a finite number"),
    (("dir=FILES/folder", "out=a", "publish=b"), "out=a excludes publish=b; use one of them"),
    ("~dir", "dir is required"),
    ("margin", "cannot read 'margin'; settings are written key=value"),
]

EVALUATE = [
    ("ckpt=FILES/tiny.ckpt", "FILES/config.yaml does not exist, so the data of FILES/tiny.ckpt are unknown; name a"),
    (("ckpt=FILES/tiny.ckpt", "data=files"), "data.path is missing; give a file, a folder or a glob, such as"),
    (("ckpt=FILES/tiny.ckpt", "data=prose", "data.tokenizer.kind=char"), "data.tokenizer.kind=char has no effect on"),
    (("ckpt=FILES/tiny.ckpt", "data=prose", "data.batch_size=4"), "data.batch_size=4 has no effect on whole texts in"),
    (("ckpt=FILES/tiny.ckpt", "pairs=FILES/nowhere"), "pairs=FILES/nowhere cannot be read (No such file or"),
    (("ckpt=FILES/tiny.ckpt", "pairs=FILES/latin1.txt"), "pairs=FILES/latin1.txt is not UTF-8 (unexpected end of"),
    (("ckpt=FILES/tiny.ckpt", "pairs=FILES/text.txt"), "pairs=FILES/text.txt: line 1 must be {"),
    (("ckpt=FILES/tiny.ckpt", "pairs=FILES/text.txt", "limit=4"), "limit=4 has no effect without tasks; leave it out"),
    (("ckpt=FILES/tiny.ckpt", "pairs=FILES/text.txt", "data=prose"), "data=prose has no effect without pairs=null"),
    (("ckpt=FILES/tiny.ckpt", "pairs=FILES/text.txt", "other=x"), "other=x has no effect without pairs=null;"),
    (("ckpt=FILES/tiny.ckpt", "data=files", "data.path=FILES/text.txt", "out=FILES/text.txt"), "cannot write to"),
    (("ckpt=FILES/tiny.ckpt", "data=nothing"), "there is no data=nothing; choose one of files, fineweb_edu, mixture,"),
]

CERTIFY = [
    ("hf=FILES/tokenizer.json", "hf=FILES/tokenizer.json cannot be loaded: Unrecognized model in"),
    ("call=x", "call=x must read package.module:function, such as"),
    (("call=os:sep", "vocab_size=3", "context_length=4"), "call=os:sep is str and not callable on ids; name a"),
    (("call=os:getcwd", "vocab_size=0", "context_length=4"), "vocab_size=0 must be an integer of at least 3"),
    ("context_length=3", "vocab_size, context_length, receptive_field go with call=...; of a fresh model set"),
    ("out=\u0000", "embedded null byte"),
    (("ckpt=FILES/tiny.ckpt", "model=nano"), "ckpt=FILES/tiny.ckpt and model=nano name several models; keep one"),
    (("call=a:b:c", "vocab_size=3", "context_length=4"), "call=a:b:c must read package.module:function, such as"),
    (("call=not_there:f", "vocab_size=3", "context_length=4"), "call=not_there:f cannot be imported: No module named"),
    ("model=null", "Config group override must be a string or a list. Got NoneType"),
]

HEADS = [
    ("dir=FILES/text.txt", "FILES/text.txt is not a folder; name that of a sweep, such as multirun/DATE/TIME"),
    ("dir=FILES/folder", "FILES/folder holds neither a sweep.json with runs nor a run with config.yaml; name the"),
    (("dir=FILES/folder", "prompt=x"), "prompt=x is for one model, dir=FILES/folder for all of a sweep; give one of"),
    ("ckpt=FILES/list.ckpt", "FILES/config.yaml does not exist, so the data of FILES/list.ckpt are unknown; name a"),
    ("seed=9223372036854775808", "seed=9223372036854775808 must be less than 9223372036854775808"),
]

REFEREE = [
    ("budget=1d", "budget=1d must be a time, such as 90s, 60m or 2h"),
    ("budget=null", "budget=None must be a time, such as 90s, 60m or 2h"),
    ("candidate=seed=1", "candidate: seed=1 cannot be set for an arm; set the first seed with seed=N, outside of the"),
    ("candidate=resume=latest", "candidate: resume=latest cannot be set for an arm; the referee continues its runs"),
    ("candidate=hydra.run.dir=x", "candidate: hydra.run.dir=x cannot be set for an arm; the referee chooses the"),
    ("candidate=-m", "candidate: cannot read '-m'; settings are written key=value"),
    ("candidate=+ablation=heads", "candidate: +ablation=heads cannot be set for an arm; name one configuration"),
    ("candidate='model.dim=", 'cannot read candidate="\'model.dim=" (No closing quotation); close the quotes'),
    ("baseline=model.dim=[", "baseline: cannot read 'model.dim=['; put quotes within quotes, \"model.dim='...'\""),
    ("candidate=model.dim=32,64", "candidate: model.dim=32,64 has several values; add -m for a grid of runs, or"),
    ("common=trainer.max_steps=x", "baseline: trainer.max_steps='x' must be a valid integer"),
    ("baseline_ref=--help", "baseline_ref=--help is not a commit of "),
    ("candidate_ref=HEAD~99999", "candidate_ref=HEAD~99999 is not a commit of "),
    ("candidate=model.n_head=3", "candidate: there is no setting model.n_head; did you mean model.n_heads?"),
    ("common=data=nothing", "baseline: there is no data=nothing; choose one of files, fineweb_edu, mixture, prose,"),
]

SAMPLE = [
    ("ckpt=FILES/other.ckpt", "FILES/other.ckpt has no state_dict and tril entries; use a .ckpt file that train.py"),
    ("ckpt=\u0000", "\\x00 does not exist; name a checkpoint file, a run's folder or latest"),
    ("ckpt=a\nb", "a b does not exist; name a checkpoint file, a run's folder or latest"),
    (("ckpt=FILES/tiny.ckpt", "n=10001"), "n=10001 must be less than or equal to 10000"),
    (("ckpt=FILES/tiny.ckpt", "stop=''"), "stop.0= must have at least 1 character"),
    (("ckpt=FILES/tiny.ckpt", "prompt=[1]"), "prompt.0=1 must be a valid string"),
    (("ckpt=FILES/tiny.ckpt", "remove_heads=[]"), "remove_heads=[] must have at least 1 item"),
    (("ckpt=FILES/tiny.ckpt", "remove_heads=[x]"), "the model has no head 'x'; with 2 layers of 4 heads, use L0H0 to"),
    (("ckpt=FILES/tiny.ckpt", "--nothing"), "--nothing: settings have no dashes; write nothing=VALUE"),
    (("ckpt=FILES/tiny.ckpt", "-m", "n=0"), "-m starts a grid of training runs, which sample cannot; leave"),
    (("ckpt=FILES/tiny.ckpt", "model=nano"), "there is no setting model; --help lists all"),
    (("ckpt=FILES/tiny.ckpt", "device=cpu:1"), "device=cpu:1 is not available; use auto, cpu"),
    (("ckpt=FILES/tiny.ckpt", "n=1", "n=0"), "n=0 must be greater than or equal to 1"),
]

ROWS = {
    "scaling": SCALING,
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
