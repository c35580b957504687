"""Wrong input for train.py.

`tests/contract/bad_input.txt` has what users do most; here is each other kind of mistake once.
"""

import pytest

from tests.bad_input.conftest import name_of

TRAIN = [
    ("optim=null", "Config group override must be a string or a list. Got NoneType"),
    ("~seed", "seed is required, only single callbacks and loggers can be removed"),
    ("~model.nothing", "there is no setting model.nothing; did you mean model.norm?"),
    ("model.dim.x=3", "there is no setting model.dim.x; did you mean model.dim?"),
    ("+model=small", "Multiple values for model. To override a value use 'override model: small'"),
    ("sweep.new=true", "sweep.new=true has no effect on a single run; leave it out, or add -m"),
    ("+ablation=heads", "the ablation is a grid over model.n_heads; run it with python train.py -m, or choose a"),
    ("model.dim=64=", "cannot read 'model.dim=64='; put quotes within quotes, \"model.dim='...'\""),
    ("model.dim=${nothing}", "Interpolation key 'nothing' not found: full_key: model.dim"),
    ("-model.dim=3", "-model.dim=3: settings have no dashes; write model.dim=3"),
    ("model.dim=\u001b[31m", "cannot read 'model.dim=\\x1b[31m'; put quotes within quotes, \"model.dim='...'\""),
    ("", "cannot read ''; settings are written key=value"),
    ("model@x=nano", "there is no setting model@x; did you mean model?"),
    ("hydra.run.dir=null", "Error merging override hydra.run.dir=null"),
    ("hydra.run.dir=", "hydra.run.dir='' is no folder; name one, or leave it out"),
    ("resume=", "an empty path names nothing; name a file, a folder or latest"),
    ("resume=FILES/tiny.ckpt", "FILES/config.yaml does not exist, so the data of FILES/tiny.ckpt are unknown; name a"),
    ("resume=\u0000", "\\x00 does not exist; name a checkpoint file, a run's folder or latest"),
    ("allow_targets=[3]", "allow_targets.0=3 must be a valid string"),
    (("resume=FILES/run", "trainer=ddp"), "trainer=ddp cannot be combined with resume: a run goes on in its folder"),
    ("model.bias=1", "model.bias=1 must be a valid boolean"),
    ("optim.betas=[0.9,1]", "optim.betas.1=1 must be less than 1"),
    (("model.dim=64", "model.dim=x"), "model.dim='x' must be a valid integer"),
    (("model.n_heads=0", "model.window=3"), "model.window=3 has no effect without model.n_heads; leave it out, or set"),
    (("model.causal=false", "model.window=3"), "model.window=3 needs model.causal=true"),
    ("model.causal=false", "model.causal=false lets every position attend to later ones, so its losses would be"),
    (("model.backend=flex", "trainer.accelerator=cpu"), "model.backend=flex needs trainer.accelerator=cuda to train,"),
    ("optim.base_width=384", "optim.base_width=384 has no effect without optim.scale_with_width; leave it out, or"),
    ("trainer.devices=x", "trainer.devices=x must be a number of devices, or auto"),
    ("trainer.max_time=99999999999:00:00:00", "trainer.max_time=99999999999:00:00:00 must be DD:HH:MM:SS, such as"),
    ("trainer.fast_dev_run=true", "there is no setting trainer.fast_dev_run; did you mean debug?"),
    (("trainer=fsdp", "compile=true"), "compile=true does not go with trainer=fsdp; set compile=false"),
    (("trainer=fsdp", "init_from=FILES/tiny.ckpt"), "init_from needs whole weights in each process; use"),
    ("checkpoint=null", "checkpoint=null must be a group of settings; change one, such as checkpoint.KEY=VALUE"),
    ("callbacks.progress=3", "callbacks.progress=3 must be a group of settings; change one, such as"),
    ("callbacks.progress._target_=os.system", "there is no setting callbacks.progress._target_; did you mean"),
    ("+callbacks.mine={}", "there is no setting callbacks.mine; choose one of callbacks.causality,"),
    ("+callbacks.mine._target_=lightning.pytorch.callbacks.Nothing", "callbacks.mine._target_=l"),
    ("+callbacks.mine._target_=tril.model.training.callbacks.output.Progress", "is not a callback or logger of"),
    (
        ("+callbacks.mine._target_=lightning.pytorch.callbacks.Timer", "+callbacks.mine.x=1"),
        "callbacks.mine._target_=l",
    ),
    ("logger=[wandb,tensorbord]", "there is no logger=tensorbord; did you mean tensorboard?"),
    ("data.source=nowhere", "data.source=nowhere must be one of stdlib, prose, shakespeare, files, hub, mixture"),
    ("data.token_budget=256", "data.token_budget=256 must be more than model.context_length=256, the tokens of one"),
    ("data.cache_dir=FILES/text.txt", "data.cache_dir=FILES/text.txt is a file; give a folder"),
    ("data=[]", "data.source=None must be one of stdlib"),
    ("data.tokenizer.kind=file", "data.tokenizer.path is missing; kind=file needs a tokenizer.json"),
    (("data.tokenizer.kind=file", "data.tokenizer.path=nowhere.json"), "data.tokenizer.path=nowhere.json does not"),
    (("data.path=FILES/text.txt", "data.val_path=nowhere"), "data.val_path=nowhere matches no file; give a file,"),
    (
        ("data=mixture", "data.sources={stdlib: 1}"),
        "data.sources={'stdlib': 1} must have at least two sources, such as",
    ),
    (("data=mixture", "data.sources={stdlib: 0, prose: 1}"), "data.sources={'prose': 1, 'stdlib': 0} must be numbers"),
    (
        ("data.path=FILES/text.txt", "data.format=chat", "data.document_mask=true"),
        "data.format=chat needs files of rows",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), TRAIN, ids=name_of)
def test_train_refuses(refused, arguments, message):
    refused("train", arguments, message)
