"""The Lightning module: its loss, with and without compilation, and its checkpoints."""

import functools
from types import SimpleNamespace

import pytest
import torch
from lightning import Trainer
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader

from tests.conftest import tiny_gpt
from tril.model.checkpoint import Checkpoint
from tril.model.gpt import IGNORE
from tril.model.training.module import TrainingModule
from tril.model.training.optim import OptimConfig
from tril.model.training.schedule import ScheduleConfig

V, T = 31, 12
EOT = 7  # opens a document
TOKENIZER = Tokenizer(models.BPE({chr(65 + i): i for i in range(V)}, []))


def batches(n, seed=0):
    ids = torch.randint(V, (n, 4, T + 1), generator=torch.Generator().manual_seed(seed))
    return [(row[:, :-1], row[:, 1:]) for row in ids]


def documents(n):
    """Batches with an end-of-text token at about every fourth position, all different."""
    rows = []
    for seed, (inputs, targets) in enumerate(batches(n)):
        ids = torch.cat([inputs[:, :1], targets], dim=1)  # (B, T + 1)
        opens = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.25
        ids = ids.masked_fill(opens, EOT)
        rows.append((ids[:, :-1], ids[:, 1:]))
    return rows


def module(compile=None, steps=6, bytes_per_token=1.0, document_eot=None, **choices):
    torch.manual_seed(0)
    model = tiny_gpt(**{"tie_embeddings": False} | choices)
    optim = OptimConfig(schedule=ScheduleConfig(warmup_steps=2))
    content = Checkpoint(model.config, {}, TOKENIZER.to_str(), "A", data={"fingerprint": "text"}).entry()
    run = {"total_steps": steps, "val_bytes": {"": lambda n_targets: n_targets * bytes_per_token}, "payload": content}
    lm = TrainingModule(model, optim, **run, compile=compile, document_eot=document_eot)
    strategy = SimpleNamespace(all_gather=lambda tensor, **_: tensor)
    lm._trainer = SimpleNamespace(num_val_batches=[2], strategy=strategy)  # until `fit`
    return lm


def fit(module, tmp_path, steps=6, data=None):
    trainer = Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data or batches(steps), batch_size=None))
    trainer.save_checkpoint(tmp_path / "fit.ckpt")
    return torch.load(tmp_path / "fit.ckpt", weights_only=True)


def test_validation_keeps_the_loss_of_every_window_in_the_order_of_the_text(monkeypatch):
    """Two processes alternate; a window that is all IGNORE fills up a batch."""
    lm, other = module(), module()
    other.load_state_dict(lm.state_dict())
    [(inputs, targets)] = batches(1)
    targets = targets.clone()
    targets[2, 5:], targets[3] = IGNORE, IGNORE
    for process, rows in ((lm, [0, 2]), (other, [1, 3])):
        with torch.no_grad():
            process.validation_step((inputs[rows], targets[rows]), 0)
    other_rows = other._val[0]
    monkeypatch.setattr(lm, "log_dict", lambda *args, **kwargs: None)
    monkeypatch.setattr(lm, "all_gather", lambda rows: torch.stack([rows, other_rows]))
    lm.on_validation_epoch_end()
    nll = [lm.model.nll(inputs[i : i + 1], targets[i : i + 1]).sum().item() for i in range(3)]
    assert lm.val_windows.tolist() == [pytest.approx(nll, rel=1e-5), [T, T, 5]]
    every = lm.model.nll(inputs[:3], targets[:3])  # (3, T)
    torch.testing.assert_close(lm.val_nll, torch.cat([every[0], every[1], every[2, :5]]).detach())


@pytest.mark.parametrize("how", ["default", "regional"])
@pytest.mark.parametrize("choices", [{}, {"document_eot": EOT, "pos": "learned", "window": 3}], ids=str)
def test_a_checkpoint_is_the_same_with_and_without_compilation(tmp_path, monkeypatch, choices, how):
    """Dynamo captures one graph, of the loss or of a block; code generation would take a minute."""
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    plain = fit(module(**choices), tmp_path, data=documents(6))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count, fullgraph=True))
    compiled = fit(module(compile=how, **choices), tmp_path, data=documents(6))
    assert len(graphs) == 1
    assert compiled["state_dict"].keys() == plain["state_dict"].keys()
    for name, tensor in plain["state_dict"].items():
        assert torch.equal(tensor, compiled["state_dict"][name]), name
    assert compiled["tril"] == plain["tril"]


@pytest.mark.parametrize("how", ["default", "regional"])
def test_more_models_are_compiled_than_the_recompile_limit_allows(monkeypatch, how):
    graphs = []
    torch._dynamo.reset()
    monkeypatch.setattr(
        torch,
        "compile",
        functools.partial(torch.compile, backend=lambda graph, _: (graphs.append(graph), graph.forward)[1]),
    )
    with torch._dynamo.config.patch(recompile_limit=2):
        for dim in range(16, 16 + 8 * 4, 8):
            module(compile=how, dim=dim, n_layers=1).train().losses(batches(1)[0])
    assert len(graphs) == 4
