"""A run folder of others is resumed as data: none of its files runs code or reads the environment."""

from pathlib import Path

import pytest
import torch
import yaml

from tests.conftest import assert_refused
from tests.runs import TINY, in_process


@pytest.fixture
def foreign_run(tmp_path, text):
    """resume(change, *overrides) continues a run after `change` has edited its config.yaml as plain containers."""
    done = in_process(*TINY, f"data.path={text}", "hydra.run.dir=run", "trainer.max_steps=4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    settings = tmp_path / "run" / "config.yaml"
    original = settings.read_text()

    def resume(change, *overrides):
        content = yaml.safe_load(original)
        change(content)
        settings.write_text(yaml.safe_dump(content))
        done = in_process("resume=run", *overrides, cwd=tmp_path)
        return done, (tmp_path / "evil").exists()

    return resume


class Evil:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_run_folder_runs_no_code_of_its_own(foreign_run, tmp_path):
    torch.save(Evil(tmp_path / "evil"), tmp_path / "x.pt")
    entry = {"_target_": "torch.load", "f": "x.pt", "weights_only": False}
    stopping = {"_target_": "lightning.pytorch.callbacks.EarlyStopping", "monitor": [entry]}
    refused = "_target_=torch.load is neither Tril's own nor in the run's folder"
    for change, key in (
        (lambda content: content["callbacks"].update(z=entry), "callbacks.z"),
        (lambda content: content.update(logger={"wandb": entry}), "logger.wandb"),
        (lambda content: content.update(logger=entry), "logger.saved"),  # in the form of older versions
        (lambda content: content.update(logger=entry, allow_targets=["torch.load"]), "logger.saved"),  # not from a file
    ):
        done, ran = foreign_run(change)
        assert_refused(done, f"the saved {key}.{refused}", f"type {key}._target_=torch.load {key}.f=x.pt")
        assert not ran
    for nested in ([{"y": entry}], stopping):
        done, ran = foreign_run(lambda content, nested=nested: content["callbacks"].update(z=nested))
        assert_refused(done, "the saved callbacks.z", "torch.load")
        assert not ran
    typed = ("callbacks.z._target_=torch.load", "callbacks.z.f=x.pt")
    done, ran = foreign_run(lambda content: content["callbacks"].update(z=entry), *typed)
    assert_refused(
        done, "is not a callback or logger of Tril or Lightning; if you trust it, add allow_targets=[torch.load]"
    )
    assert not ran
    _, ran = foreign_run(lambda content: content["callbacks"].update(z=entry), *typed, "allow_targets=[torch.load]")
    assert ran, "the command line allows it"


def test_a_hydra_block_in_a_run_folder_has_no_effect(foreign_run):
    evil = {"_target_": "os.mkdir", "path": "evil"}
    done, ran = foreign_run(lambda content: content.update(hydra={"callbacks": {"z": evil}, "launcher": dict(evil)}))
    assert done.returncode == 0 and not ran, done.stderr


def test_a_checkpoint_of_a_run_folder_is_not_unpickled(foreign_run, tmp_path):
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    torch.save(torch.load(last, weights_only=True) | {"evil": Evil(tmp_path / "evil")}, last)
    done, ran = foreign_run(lambda content: None)
    assert_refused(done, "last.ckpt is not a checkpoint")
    assert not ran


def test_a_saved_text_is_never_an_interpolation(foreign_run, tmp_path):
    """Neither the environment nor a resolver is read for it, and a prompt with `${` survives."""
    samples, settings = tmp_path / "run" / "samples.txt", tmp_path / "run" / "config.yaml"
    done, _ = foreign_run(lambda content: content["callbacks"]["samples"].update(prompt="${oc.env:HOME}"))
    assert done.returncode == 0, done.stderr
    assert "prompt: ${oc.env:HOME}" in settings.read_text()
    done, _ = foreign_run(lambda content: None, "trainer.max_steps=8", "callbacks.samples.prompt=a${b}")
    assert done.returncode == 0, done.stderr
    assert "a${b}" in samples.read_text() and "prompt: a${b}" in settings.read_text()
    create = "${oc.create:{_target_: os.mkdir, path: evil}}"
    done, ran = foreign_run(lambda content: content["callbacks"].update(z=create))
    assert_refused(done, f"the saved callbacks.z={create} is neither Tril's own nor in the run's folder")
    assert not ran
