"""Two processes decide alike about a step that is not finite in one of them, and sum the norms of divided gradients."""

import json
import os
import socket
import subprocess
import sys

import pytest

PROGRAM = """
import json, os, sys
import torch
from tests.model.training import tiny_fits
from tests.model.training.tiny_fits import V, fit, new_model, new_module, weights
from tril.model.training.callbacks.gradient_norms import GradientNorms, sharded_norms
from tril.model.training.errors import NonFiniteError

rank, found = int(os.environ["LOCAL_RANK"]), {}
options = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False, "limit_val_batches": 0}
whole = tiny_fits.batches

def batches(n=8):
    \"\"\"Batch 2 of rank 1 alone has the token V - 1.\"\"\"
    data = [(inputs.clamp(max=V - 2), targets) for inputs, targets in whole(2 * n)[rank::2]]
    if rank == 1 and n > 2:
        data[2][0][0, 0] = V - 1
    return data

tiny_fits.batches = batches

def damaged():
    model = new_model()
    model.embed.weight.data[V - 1] = torch.nan
    return new_module(model)

try:
    fit(damaged(), GradientNorms(), **options)
except NonFiniteError as error:
    found["stopped"] = str(error)
module = damaged()
step = module.training_step
module.training_step = lambda batch, batch_idx: step(batch, batch_idx) + (torch.inf if rank + batch_idx == 6 else 0)
callback = GradientNorms("skip")
fit(module, callback, **options)  # an infinite loss, with finite gradients: of rank 0 at batch 6, of rank 1 at 5
found |= {"skipped": callback.skipped, "rows": callback.rows}
found["weights"] = sum(value.nan_to_num().double().sum().item() for value in weights(module).values())

from torch.distributed.tensor import Replicate, Shard, distribute_tensor
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
torch.manual_seed(0)
tensors = [torch.randn(5, 3), torch.randn(4, 7), torch.randn(6), torch.randn(1, 3)]
layouts = [[Shard(0)], [Shard(1)], [Replicate()], [Shard(0)]]
divided = [distribute_tensor(each, mesh, layout) for each, layout in zip(tensors, layouts)] + [tensors[0]]
found["norms"] = torch.stack(sharded_norms(divided)).tolist()
found["expected"] = [each.double().square().sum().sqrt().item() for each in [*tensors, tensors[0]]]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "NODE_RANK": "0"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env=os.environ | world | {"LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


@pytest.mark.slow
def test_all_processes_stop_with_the_same_text(ranks):
    """10 s for the processes."""
    first, second = (each["stopped"] for each in ranks)
    assert first == second and first.startswith("step 3 is not finite: loss nan, gradient norm nan, batch 2 of rank 1 ")
    assert "first non-finite output embed," in first


@pytest.mark.slow
def test_all_processes_skip_the_same_steps(ranks):
    first, second = ranks
    assert first["skipped"] == second["skipped"] == [3, 6, 7]
    assert first["rows"] == second["rows"] and first["weights"] == second["weights"]


@pytest.mark.slow
def test_norms_of_divided_gradients_are_those_of_the_whole(ranks):
    for each in ranks:
        assert each["norms"] == pytest.approx(each["expected"], rel=1e-6)
