"""The data module in a Lightning fit: its batches, and those after a resume."""

import warnings
from types import SimpleNamespace

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tril.data import datamodule
from tril.data.batches import on_device
from tril.data.config import DataConfig
from tril.data.datamodule import TextDataModule
from tril.data.sources.files import Files
from tril.data.tokenizer import TokenizerConfig

# Lightning with a newer torch
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")


class Toy(lightning.LightningModule):
    """Records its batches."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.train_batches, self.val_batches = [], []

    def training_step(self, batch, _):
        self.train_batches.append(batch[0])
        return self.scale * batch[0].float().mean()

    def validation_step(self, batch, _):
        self.val_batches.append(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


@pytest.fixture
def make_data(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {i} of the text\n" for i in range(40)))

    def make(**options):
        arguments = {"context_length": 16, "batch_size": 4, "cache_dir": str(tmp_path / "cache"), "seed": 1} | options
        module = {name: arguments.pop(name) for name in ("context_length", "seed")}
        source = Files(path=str(tmp_path / "text.txt"), val_fraction=0.1)
        return TextDataModule(DataConfig(source, TokenizerConfig(kind="byte"), **arguments), **module)

    return make


def fit(data, folder, max_steps, resume=None, **options):
    toy = Toy()
    checkpoints = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=max_steps, callbacks=[checkpoints], check_val_every_n_epoch=None,
        **{"val_check_interval": 7, "num_sanity_val_steps": 0} | quiet | options,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not resumable.*")
        warnings.filterwarnings("ignore", message=".*num_workers.*|.*is not empty.*|.*dirpath has changed.*")
        trainer.fit(toy, data, ckpt_path=resume)
    return toy


@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 7}, {"accumulate_grad_batches": 2}])
def test_a_resumed_fit_gets_exactly_the_remaining_batches(make_data, tmp_path, options):
    """Stopped in the middle of an epoch, at its end, just after, where validation runs, and in the second epoch."""
    expected = fit(make_data(), tmp_path / "whole", max_steps=30, **options).train_batches
    n = len(make_data().train_dataloader())
    assert n == 11
    for stop in (3, 6, 7, n, n + 1, 14, 2 * n - 1):
        first = fit(make_data(), tmp_path / f"run{stop}", max_steps=stop, **options)
        rest = fit(
            make_data(), tmp_path / "rest", max_steps=30, resume=tmp_path / f"run{stop}/step={stop}.ckpt", **options
        )
        assert len(first.train_batches) >= stop and len(rest.train_batches) >= 30 - stop
        assert torch.equal(torch.cat(first.train_batches + rest.train_batches), torch.cat(expected)), (
            f"stopped at {stop}"
        )


@pytest.mark.parametrize(("free", "resident"), [(4, True), (3, False)])
def test_tokens_move_to_a_gpu_once_where_they_fit(make_data, monkeypatch, free, resident):
    """The GPU has `free` times the memory of the training part. The meta device replaces it."""
    data, moved = make_data(), []
    host = data.texts[""].tokens("train")
    data.trainer = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cuda:0")),
        global_rank=0,
        world_size=1,
        accumulate_grad_batches=1,
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * host.nbytes, 1 << 40))
    monkeypatch.setattr(
        datamodule, "on_device", lambda tokens, device: (moved.append(device), on_device(tokens, "meta"))[1]
    )
    loaders = [data.train_dataloader() for _ in range(2)]
    assert moved == resident * [torch.device("cuda:0")]
    for loader in loaders:
        assert (loader.texts[0].device.type == "meta") == resident
        inputs, targets = next(iter(loader))
        assert inputs.shape == targets.shape == (4, 16) and inputs.device.type == ("meta" if resident else "cpu")


def test_a_batch_of_many_times_the_text_is_refused_and_one_of_a_short_test_text_is_not(make_data):
    """The checks of the loss cut their own short texts into windows of the run's batch size."""
    data = make_data(batch_size=100)
    data.prepare_data()
    n_windows = data.train_dataloader().n_windows
    assert 10 < n_windows < 100
    short = data.windows_of(torch.arange(18))["train"]
    assert len(next(iter(short))[0]) == 100
    data.batch_size = 10 * n_windows
    data.train_dataloader()
    data.batch_size += 1
    with pytest.raises(ValueError, match=rf"is more than 10 times the {n_windows} windows of the training part; use"):
        data.train_dataloader()
