"""What a run uses and reports: hardware on simulated machines, memory, the version of the code, names at wandb."""

import subprocess
import sys

import pytest
import torch

from tril.model.training import hardware, loggers
from tril.model.training.hardware import select_hardware
from tril.model.training.summary import PACKAGE, code_version, peak_memory_bytes


@pytest.fixture
def machine(monkeypatch):
    """Simulates a machine; by default without accelerator and bf16."""

    def simulate(cuda=None, cuda_bf16=False, mps=False, avx512_bf16=False, amx=False, triton=True, cc=sys.executable):
        has_bf16 = lambda including_emulation=True: cuda_bf16 or including_emulation  # noqa: E731
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda is not None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", has_bf16)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
        monkeypatch.setattr(hardware, "has_triton", lambda: triton)
        monkeypatch.setenv("CC", cc)  # any existing program
        monkeypatch.setenv("CXX", "no-such-compiler")

    return simulate


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"cuda": "NVIDIA H200", "cuda_bf16": True, "mps": True}, ("cuda", "bf16-mixed", "default")),
        ({"cuda": "Tesla V100-SXM2-16GB"}, ("cuda", "16-mixed", "default")),
        ({"cuda": "NVIDIA A10", "cuda_bf16": True, "triton": False}, ("cuda", "bf16-mixed", None)),
        ({"cuda": "NVIDIA A10", "cuda_bf16": True, "cc": "no-such-compiler"}, ("cuda", "bf16-mixed", None)),
        ({"mps": True, "avx512_bf16": True}, ("mps", "32-true", None)),
        ({"avx512_bf16": True}, ("cpu", "bf16-mixed", None)),
        ({"amx": True}, ("cpu", "bf16-mixed", None)),
        ({}, ("cpu", "32-true", None)),
    ],
)
def test_auto_follows_the_machine(machine, given, expected):
    machine(**given)
    picked = select_hardware()
    assert (picked.accelerator, picked.precision, picked.compile) == expected
    assert picked.peak_flops == (989e12 if given.get("cuda") == "NVIDIA H200" else None)
    assert picked.device_name == given.get("cuda", picked.device_name) != ""


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        ({}, {"accelerator": "mps"}, "trainer.accelerator=mps is not available .* has cpu; use auto"),
        ({"mps": True}, {"precision": "16-mixed"}, "16-mixed needs trainer.accelerator=cuda, not mps; use auto"),
        ({"cuda": "A10", "cc": "none"}, {"compile": True}, "needs a compiler; .* name one in CC, or use"),
        ({"cuda": "A10", "triton": False}, {"compile": True}, "for cuda needs Triton; .* or use compile=false"),
        ({}, {"compile": "reduce-overhead"}, "needs trainer.accelerator=cuda, not cpu; use compile=true"),
        ({}, {"compile": "regional"}, "needs a compiler; install g.. or name one in CXX, or use compile=false"),
    ],
)
def test_what_the_machine_lacks_is_refused(machine, given, settings, message):
    machine(**given)
    with pytest.raises(ValueError, match=message):
        select_hardware(**settings)


def test_the_memory_of_a_run_is_that_of_its_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 10**15)
    assert peak_memory_bytes("cuda") == 3 * 10**15 and 1e7 < peak_memory_bytes("cpu") < 3 * 10**15


def test_the_code_version_is_that_of_this_checkout_alone_and_counts_changes_of_tracked_files(tmp_path):
    """A package installed within another repository has none."""
    package = tmp_path / "site-packages" / "tril"
    package.mkdir(parents=True)

    def git(*command):
        identity = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org"]
        subprocess.run(["git", "-C", tmp_path, *identity, *command], check=True, capture_output=True)

    (tmp_path / "tracked").write_text("a")
    git("init")
    git("add", "tracked")
    git("commit", "-m", "theirs")
    (package / "untracked").touch()
    commit = code_version(tmp_path)
    assert code_version(package) is None and commit is not None and len(commit) == 12
    (tmp_path / "tracked").write_text("b")
    assert code_version(tmp_path) == commit + "+"
    assert (code_version() is None) != (PACKAGE / ".git").exists()


@pytest.mark.parametrize(
    ("account", "chosen", "mode"), [(False, None, "offline"), (True, None, None), (False, "x", None)]
)
def test_wandb_is_offline_without_an_account_only(monkeypatch, tmp_path, account, chosen, mode):
    monkeypatch.setattr("wandb.login", lambda prompt: account)
    monkeypatch.setenv("WANDB_MODE", chosen) if chosen else monkeypatch.delenv("WANDB_MODE", raising=False)
    assert loggers.wandb_logger(str(tmp_path))._wandb_init.get("mode") == mode
