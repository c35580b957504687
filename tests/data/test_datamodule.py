"""The data module: tokens on a GPU, and the sizes of batches."""

from types import SimpleNamespace

import pytest
import torch

from tril.data import datamodule
from tril.data.batches import on_device
from tril.data.datamodule import TextDataModule
from tril.data.sources.files import Files
from tril.data.tokenizer import TokenizerConfig


@pytest.fixture
def make_data(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {i} of the text\n" for i in range(40)))

    def make(batch_size=4, context_length=16, **settings):
        settings |= {"batch_size": batch_size, "cache_dir": str(tmp_path / "cache"), "val_fraction": 0.1}
        source = Files(path=str(tmp_path / "text.txt"), tokenizer=TokenizerConfig(kind="byte"), **settings)
        return TextDataModule(source, context_length=context_length, seed=1)

    return make


def trainer_of(device):
    """The part of a Trainer that the data use."""
    strategy = SimpleNamespace(root_device=torch.device(device))
    return SimpleNamespace(strategy=strategy, global_rank=0, world_size=1, accumulate_grad_batches=1, max_steps=10)


@pytest.mark.parametrize(("free", "resident"), [(8, True), (7, False)])
def test_tokens_move_to_a_gpu_where_they_fit(make_data, monkeypatch, free, resident):
    """The GPU has `free` times the memory of the training part. The meta device replaces it."""
    data = make_data()
    host, data.trainer = data.text.tokens("train"), trainer_of("cuda:0")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * host.nbytes, 1 << 40))
    monkeypatch.setattr(datamodule, "on_device", lambda tokens, device: on_device(tokens, "meta"))
    loader = data.train_dataloader()
    assert (loader.tokens.device.type == "meta") == resident
    inputs, targets = next(iter(loader))
    assert inputs.shape == targets.shape == (4, 16) and inputs.device.type == ("meta" if resident else "cpu")


def test_a_batch_may_have_more_windows_than_the_text(make_data):
    data = make_data(batch_size=100)
    for windows in (data.train_dataloader(), data.windows_of(torch.arange(18))["train"]):
        assert windows.n_windows < 100 and len(next(iter(windows))[0]) == 100


DOUBLED = [  # context_length, settings, and the length of the windows in each of ten steps
    (512, {}, [128] * 3 + [256] * 4 + [512] * 3),
    (512, {"double_length_at": [0.5]}, [256] * 5 + [512] * 5),
    (256, {}, [128] * 7 + [256] * 3),
    (300, {}, [150] * 7 + [300] * 3),
    (301, {}, [301] * 10),  # half of it is not whole
    (254, {}, [254] * 10),  # half of it is too short
]


@pytest.mark.parametrize(("context_length", "settings", "lengths"), DOUBLED)
def test_windows_double_in_length_at_fractions_of_the_steps_which_may_change(
    make_data, context_length, settings, lengths
):
    data = make_data(1, context_length, **settings)
    assert data.length_at(0) == context_length  # without a trainer
    data.trainer = trainer_of("cpu")
    assert [data.length_at(step) for step in range(10)] == lengths
    assert next(iter(data.train_dataloader()))[0].shape == (context_length // lengths[0], lengths[0])
    data.trainer.max_steps = 20
    assert [data.length_at(step) for step in range(20)] == [each for each in lengths for _ in range(2)]
    data.trainer = None
    shapes = {name: next(iter(part))[0].shape for name, part in data.windows_of(torch.arange(600)).items()}
    assert {shape[1] for shape in shapes.values()} == {*lengths} and shapes["val"] == (1, context_length)
