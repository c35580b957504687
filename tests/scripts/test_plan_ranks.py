"""Memory and communication that plan.py calculates for several processes are those of four real ones."""

import json

import pytest

from tests.ranks import run_ranks
from tril.model.gpt import GPTConfig
from tril.model.training.hardware import Hardware
from tril.model.training.optim import OptimConfig
from tril.scripts.planning.communication import sent_per_step
from tril.scripts.planning.process_grid import ProcessGrid
from tril.scripts.planning.rank_memory import RankModel

CPU = Hardware("cpu", "32-true", None, "a machine", None)
SHAPE = {"vocab_size": 2048, "n_layers": 4, "dim": 256, "n_heads": 4, "context_length": 128}
LLAMA = SHAPE | {"mlp": "swiglu", "mlp_hidden": 512, "qk_norm": "none", "tie_embeddings": False, "vocab_size": 4096}
CASES = {  # name: fields, optimizer, whether FSDP2 shards it, windows per rank
    "ddp": (SHAPE, "muon", False, 2),
    "fsdp": (SHAPE, "muon", True, 4),
    "fsdp, peak in the optimizer's step": (SHAPE, "muon", True, 1),
    "fsdp adamw": (LLAMA, "adamw", True, 8),
}
RANKS = 4


@pytest.mark.long
def test_memory_and_communication_are_those_of_four_processes(tmp_path):
    (tmp_path / "cases.json").write_text(json.dumps(CASES))
    run_ranks(RANKS, "tests.scripts.planned_ranks", tmp_path / "cases.json")
    measured = json.loads((tmp_path / "cases.measured").read_text())
    ratios = {}
    for name, (fields, kind, sharded, windows) in CASES.items():
        grid = ProcessGrid(RANKS, sharded=sharded)
        rank = RankModel(GPTConfig(**fields), OptimConfig(kind=kind), CPU, grid)
        planned = {"peak": rank.memory(windows, 1).peak, "sent": sum(sent_per_step(rank, 1).values())}
        ratios |= {(name, key): planned[key] / measured[name][key] for key in planned}
    assert ratios == {(name, key): pytest.approx(1, abs=0.1 if key == "peak" else 0.01) for name, key in ratios}, ratios
