"""Wrong input for certify.py, heads.py and control.py."""

import pytest

from tests.bad_input.conftest import name_of

CERTIFY = [
    ("ckpt=FILES/empty", "FILES/empty is not a checkpoint, or is truncated (File is not a zip file); use"),
    ("ckpt=FILES/text.txt", "FILES/text.txt is not a checkpoint, or is truncated (File is not a zip file); use"),
    ("ckpt=FILES/folder", "FILES/folder contains no checkpoints/best.ckpt or checkpoints/last.ckpt; name a"),
    ("ckpt=[]", "ckpt=[] must be a valid string"),
    ("ckpt=''", ". contains no checkpoints/best.ckpt or checkpoints/last.ckpt; name a checkpoint"),
    ("ckpt=latest", "no checkpoint below outputs/ or multirun/ of CWD; train first, or name a file"),
    ("hf=FILES/folder", "hf=FILES/folder is a folder without config.json; name a folder written by"),
    ("hf=FILES/empty", "hf=FILES/empty cannot be loaded: It looks like the config file at 'FILES/empty' is"),
    ("hf=FILES/text.txt", "hf=FILES/text.txt cannot be loaded: It looks like the config file at"),
    ("hf=''", "hf= is a folder without config.json; name a folder written by save_pretrained, a"),
    ("hf=[]", "hf=[] must be a valid string"),
    ("hf=FILES/tokenizer.json", "hf=FILES/tokenizer.json cannot be loaded: Unrecognized model in"),
    ("call=x", "vocab_size=null must be a valid integer; context_length=null must be a valid integer"),
    ("call=os", "vocab_size=null must be a valid integer; context_length=null must be a valid integer"),
    ("call=''", "vocab_size=null must be a valid integer; context_length=null must be a valid integer"),
    (
        ("call=os:nothing", "vocab_size=3", "context_length=4"),
        "call=os:nothing: module 'os' has no attribute 'nothing'; name a function of os",
    ),
    (("call=os:getcwd", "vocab_size=0", "context_length=4"), "vocab_size=0 must be greater than or equal to 3"),
    (
        ("call=os:sep", "vocab_size=3", "context_length=4"),
        "call=os:sep is str and not callable on ids; name a function or a module instance",
    ),
    (("call=os:getcwd", "vocab_size=3", "context_length=-4"), "context_length=-4 must be greater than or equal to 1"),
    (("call=os:getcwd", "vocab_size=true", "context_length=4"), "vocab_size=true must be a valid integer"),
    (("call=os:getcwd", "vocab_size=3"), "context_length=null must be a valid integer"),
    ("call=:", "vocab_size=null must be a valid integer; context_length=null must be a valid integer"),
    ("call=a:b:c", "vocab_size=null must be a valid integer; context_length=null must be a valid integer"),
    ("context_length=3", "vocab_size, context_length, receptive_field go with call=...; of a fresh model set"),
    ("receptive_field=1", "vocab_size, context_length, receptive_field go with call=...; of a fresh model set"),
    ("compile=maybe", "compile='maybe' must be a valid boolean"),
    ("compile=1", "compile=1 must be a valid boolean"),
    ("exhaustive=2", "exhaustive=2 must be a valid boolean"),
    ("exhaustive=null", "exhaustive=null must be a valid boolean"),
    ("device=null", "device=null must be a valid string"),
    ("device=mps", "device=mps is not available; use auto, cpu"),
    ("device=''", "device= is not available; use auto, cpu"),
    ("out=FILES/text.txt", "cannot write to FILES/text.txt; choose another folder with out=FOLDER"),
    ("out=FILES/text.txt/x", "cannot write to FILES/text.txt/x; choose another folder with out=FOLDER"),
    ("out=[]", "out=[] must be a valid string"),
    ("out=\x00", "embedded null byte"),
    ("model=null", "Config group override must be a string or a list. Got NoneType"),
    ("model=nothing", "there is no model=nothing; choose one of base, gpt2, llama, nano, qwen3, small"),
    ("model.dim=0", "model.dim=0 must be greater than or equal to 1"),
    ("model.vocab_size=-1", "model.vocab_size=-1 must be greater than or equal to 1"),
    ("model.vocab_size=true", "model.vocab_size=true must be a valid integer"),
    ("+model.dims=3", "there is no setting model.dims; did you mean model.dim?"),
    ("model.mlp_ratio=1.7e308", "model.mlp_ratio=1.7e+308 must be less than 2147483648"),
    ("~model.vocab_size", "Could not delete from config. 'model.vocab_size' does not exist."),
    ("~model", "model is missing"),
    ("~ckpt", "Could not delete from config. 'ckpt' does not exist."),
    ("seed=1", "there is no setting seed; see python script.py --help"),
    ("-m", "-m starts a grid of training runs, which python script.py cannot; leave it out"),
    ("model.dim=32,64", "model.dim=32,64 has several values; give one"),
    (("ckpt=FILES/tiny.ckpt", "model=nano"), "ckpt=FILES/tiny.ckpt and model=nano name several models; keep one"),
    (
        ("ckpt=FILES/tiny.ckpt", "call=os:getcwd", "vocab_size=3", "context_length=4"),
        "ckpt=FILES/tiny.ckpt and call=os:getcwd name several models; keep one",
    ),
    (("ckpt=FILES/tiny.ckpt", "compile=x"), "compile='x' must be a valid boolean"),
]

CONTROL = [
    ("masked=FILES/tiny.ckpt", "unmasked is missing; give the folder of a run of `python train.py"),
    ("unmasked=FILES/tiny.ckpt", "masked is missing; give the folder of a run of `python train.py`:"),
    ("masked=[]", "masked=[] must be a valid string"),
    ("masked=''", ". contains no checkpoints/last.ckpt; name a checkpoint file or a run's folder"),
    (
        ("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt"),
        "FILES/config.yaml does not exist, so the data of FILES/tiny.ckpt are unknown; name",
    ),
    (
        ("masked=FILES/empty", "unmasked=FILES/empty"),
        "FILES/config.yaml does not exist, so the data of FILES/empty are unknown; name a",
    ),
    (
        ("masked=FILES/folder", "unmasked=FILES/folder"),
        "FILES/folder contains no checkpoints/last.ckpt; name a checkpoint file or a run's",
    ),
    (
        ("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "windows=1"),
        "windows=1 must be greater than or equal to 2",
    ),
    (("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "windows=true"), "windows=true must be a valid integer"),
    (("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "windows=x"), "windows='x' must be a valid integer"),
    (("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "windows=null"), "windows=null must be a valid integer"),
    (("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "windows=1.5"), "windows=1.5 must be a valid integer"),
    (
        ("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "prompts=[]"),
        "prompts=[] must have at least 1 item after validation, not 0",
    ),
    (("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "prompts=x"), "prompts='x' must be a valid list"),
    (("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "prompts=[1]"), "prompts.0=1 must be a valid string"),
    (("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "prompts=null"), "prompts=null must be a valid list"),
    (
        ("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "max_new_tokens=0"),
        "max_new_tokens=0 must be greater than or equal to 1",
    ),
    (
        ("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "max_new_tokens=true"),
        "max_new_tokens=true must be a valid integer",
    ),
    (
        ("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "max_new_tokens=-3"),
        "max_new_tokens=-3 must be greater than or equal to 1",
    ),
    (
        ("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "temperature=-1"),
        "temperature=-1 must be greater than or equal to 0",
    ),
    (
        ("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "temperature=nan"),
        "temperature=nan must be a finite number",
    ),
    (("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "temperature=x"), "temperature='x' must be a valid number"),
    (
        ("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "temperature=1e400"),
        "temperature=inf must be a finite number",
    ),
    (
        ("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "temperature=true"),
        "temperature=true must be a valid number",
    ),
    (("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "seed=-1"), "seed=-1 must be greater than or equal to 0"),
    (("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "seed=true"), "seed=true must be a valid integer"),
    (("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "seed=x"), "seed='x' must be a valid integer"),
    (
        ("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "seed=18446744073709551616"),
        "seed=18446744073709551616 must be less than 18446744073709551616",
    ),
    (("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "out=[]"), "out=[] must be a valid string"),
    (
        ("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "out=FILES/text.txt"),
        "FILES/config.yaml does not exist, so the data of FILES/tiny.ckpt are unknown; name",
    ),
    (("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "~windows"), "windows is missing"),
    (("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "~prompts"), "prompts is missing"),
    (("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "~masked"), "masked is missing"),
    (
        ("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "window=3"),
        "there is no setting window; did you mean windows?",
    ),
    (
        ("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "+foo=1"),
        "there is no setting foo; choose one of masked, max_new_tokens, out, prompts, seed,",
    ),
    (
        ("masked=FILES/tiny.ckpt", "unmasked=FILES/tiny.ckpt", "-m"),
        "-m starts a grid of training runs, which python script.py cannot; leave it out",
    ),
]

HEADS = [
    ("ckpt=null", "ckpt=null must be a valid string"),
    ("ckpt=''", ". contains no checkpoints/best.ckpt or checkpoints/last.ckpt; name a checkpoint"),
    ("ckpt=FILES/empty", "FILES/config.yaml does not exist, so the data of FILES/empty are unknown; name a"),
    ("ckpt=FILES/tiny.ckpt", "FILES/config.yaml does not exist, so the data of FILES/tiny.ckpt are unknown; name"),
    ("ckpt=FILES/text.txt", "FILES/config.yaml does not exist, so the data of FILES/text.txt are unknown; name a"),
    ("ckpt=FILES/list.ckpt", "FILES/config.yaml does not exist, so the data of FILES/list.ckpt are unknown; name"),
    ("ckpt=[]", "ckpt=[] must be a valid string"),
    ("windows=1", "windows=1 must be greater than or equal to 2"),
    ("windows=x", "windows='x' must be a valid integer"),
    ("windows=true", "windows=true must be a valid integer"),
    ("windows=null", "windows=null must be a valid integer"),
    ("windows=1e3", "windows=1000.0 must be a valid integer"),
    (
        "windows=1000000000000000000000000000000",
        "no checkpoint below outputs/ or multirun/ of CWD; train first, or name a file",
    ),
    ("seed=-1", "seed=-1 must be greater than or equal to 0"),
    ("seed=true", "seed=true must be a valid integer"),
    ("seed=null", "seed=null must be a valid integer"),
    ("seed=9223372036854775808", "seed=9223372036854775808 must be less than 9223372036854775808"),
    ("device=null", "device=null must be a valid string"),
    ("device=3", "device=3 must be a valid string"),
    ("dir=''", ". holds neither a sweep.json with runs nor a run with config.yaml; name the folder"),
    ("dir=[]", "dir=[] must be a valid string"),
    ("dir=FILES/text.txt", "FILES/text.txt is not a folder; name that of a sweep, such as multirun/DATE/TIME"),
    ("dir=FILES/folder", "FILES/folder holds neither a sweep.json with runs nor a run with config.yaml; name"),
    ("dir=FILES/empty", "FILES/empty is not a folder; name that of a sweep, such as multirun/DATE/TIME"),
    (("dir=FILES/folder", "ckpt=x"), "ckpt=x is for one model, dir=FILES/folder for all of a sweep; give one of them"),
    (
        ("dir=FILES/folder", "prompt=x"),
        "prompt=x is for one model, dir=FILES/folder for all of a sweep; give one of them",
    ),
    ("out=[]", "out=[] must be a valid string"),
    (
        ("ckpt=FILES/tiny.ckpt", "out=FILES/text.txt"),
        "FILES/config.yaml does not exist, so the data of FILES/tiny.ckpt are unknown; name",
    ),
    (("dir=FILES/folder", "device=tpu"), "device=tpu is not available; use auto, cpu"),
    ("prompt=[]", "prompt=[] must be a valid string"),
    ("~windows", "windows is missing"),
    ("~ckpt", "ckpt is missing"),
    ("~dir", "Could not delete from config. 'dir' does not exist."),
    ("window=3", "there is no setting window; did you mean windows?"),
    ("+windows=3", "Could not append to config. An item is already at 'windows'.: Either remove +"),
    ("-m", "-m starts a grid of training runs, which python script.py cannot; leave it out"),
    ("dir=\x00", "\\x00 is not a folder; name that of a sweep, such as multirun/DATE/TIME"),
    (("ckpt=FILES/tiny.ckpt", "device=tpu"), "device=tpu is not available; use auto, cpu"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "message"), CERTIFY, ids=name_of)
def test_certify_refuses(refused, arguments, message):
    refused("certify", arguments, message)


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "message"), CONTROL, ids=name_of)
def test_control_refuses(refused, arguments, message):
    refused("control", arguments, message)


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "message"), HEADS, ids=name_of)
def test_heads_refuses(refused, arguments, message):
    refused("heads", arguments, message)
