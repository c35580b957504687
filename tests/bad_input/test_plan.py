"""Wrong input for plan.py."""

import pytest

from tests.bad_input.conftest import name_of

PLAN = [
    ("gpus=[]", "gpus=[] must have at least 1 item"),
    ("gpus=[0]", "gpus.0=0 must be greater than or equal to 1"),
    ("gpus=8", "gpus=8 must be a valid list"),
    ("gpu=H1000", "gpu=H1000 has no known peak FLOP/s; choose one of B200, H200 NVL, H200, GH200, H100"),
    ("gpu_memory=0", "gpu_memory=0 must be greater than 0"),
    ("mfu=0", "mfu=0 must be greater than 0"),
    ("mfu=1.5", "mfu=1.5 must be less than or equal to 1"),
    ("link=-1", "link=-1 must be greater than 0"),
    ("time=maybe", "time='maybe' must be a valid boolean"),
    ("model.n_heads=5", "model.n_heads=5 must divide model.dim=192"),
    ("data.batch_size=0", "data.batch_size=0 must be greater than or equal to 1"),
    ("trainer.precision=x", "trainer.precision=x must be 'auto', '32-true', 'bf16-mixed', 'bf16-true' or"),
    (
        ("data.tokenizer.kind=hub", "data.tokenizer.path=x"),
        "model.vocab_size=null needs a local tokenizer; set it, as in model.vocab_size=50304",
    ),
    (("trainer=fsdp", "compile=true"), "compile=true does not go with trainer=fsdp; set compile=false"),
    (("optim=adamw", "optim.momentum=0.5"), "optim.momentum=0.5 has no effect with optim.kind=adamw"),
    ("model.causal=false", "model.causal=false lets every position attend to later ones"),
    ("+foo=1", "there is no setting foo"),
    ("out=x", "there is no setting out; see"),
]


@pytest.mark.parametrize(("arguments", "message"), PLAN, ids=name_of)
def test_plan_refuses(refused, arguments, message):
    refused("plan", arguments, message)
