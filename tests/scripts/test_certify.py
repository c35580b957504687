"""scripts/certify.py as it is typed: what it writes, what it says of a leak, its exit status."""

import json
import math

import pytest
import torch
from tokenizers import Tokenizer, models

from tests.conftest import assert_refused, run_python, tiny_gpt
from tril.model.checkpoint import save
from tril.model.generation.language_model import LanguageModel
from tril.scripts.certify import subject
from tril.scripts.common.cli import CONFIGS

SMALL = ["model.n_layers=1", "model.dim=16", "model.n_heads=2", "model.context_length=9", "device=cpu"]


def certify(*overrides, cwd):
    return run_python(CONFIGS.parent / "scripts" / "certify.py", *overrides, cwd=cwd)


def test_a_fresh_model_is_certified(tmp_path):
    done = certify(*SMALL, "model.window=3", "out=here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "nano sees no future, and all of its past" in done.stdout and "FAILED" not in done.stdout
    assert not [
        line for line in done.stderr.splitlines() if not line.startswith("weights=")
    ]  # what it is at, and no warnings
    written = json.loads((tmp_path / "here" / "causality.json").read_text())
    assert written["passed"] and {result["length"] for result in written["results"]} == {
        1,
        2,
        3,
        4,
        5,
        9,
    }  # 5 positions of padding, and 4 are left
    assert (tmp_path / "here" / "causality.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here"]


def test_exhaustive_and_compile_reach_the_grid(monkeypatch):
    monkeypatch.setattr("tril.scripts.certify.chosen", lambda group: "nano")
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    model = {"vocab_size": None, "context_length": 4, "n_layers": 1, "dim": 8, "n_heads": 1}
    for on in (False, True):
        cfg = {"hf": None, "call": None, "model": model, "exhaustive": on, "compile": on}
        cells = list(subject(cfg, None, "cpu")[1])
        assert all(math.isinf(cell.budget) is on for cell in cells)
        assert any(cell.subject.compiled for cell in cells) is on


def test_a_model_without_mask_fails_with_the_place_of_its_first_leak(tmp_path):
    done = certify(*SMALL, "model.causal=false", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "FAILED  attention: layer 0, head 0, query 0, key 1: weight" in done.stdout
    assert "FAILED  no future: by perturbation: query 0 changes with key 1, first in layer 0" in done.stdout
    assert "FAILED  canary: loss" in done.stdout and "nano is NOT certified" in done.stdout
    assert json.loads((tmp_path / "outputs" / "causality" / "nano" / "causality.json").read_text())["passed"] is False


def test_compiling_without_a_compiler_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert_refused(certify(*SMALL, "compile=true", cwd=tmp_path), "compiling for a CPU needs a C++ compiler")
    assert not list(tmp_path.iterdir())


def test_compiled_code_is_kept_beside_the_data(monkeypatch, tmp_path):
    """The place is chosen before a compiler is looked for, and there is none here: so nothing has to be compiled."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    script = CONFIGS.parent / "scripts" / "certify.py"
    code = (
        "import atexit, os, runpy, sys\n"
        "atexit.register(lambda: print(os.environ.get('TORCHINDUCTOR_CACHE_DIR')))\n"
        f"sys.argv[0] = {str(script)!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    done = run_python(
        "-c", code, *SMALL, "compile=true", cwd=tmp_path, CXX="no-such-compiler", TRIL_CACHE=str(tmp_path / "cache")
    )
    assert done.stdout == f"{tmp_path / 'cache' / 'compiled'}\n", done.stderr


def test_a_checkpoint_is_certified_beside_its_file(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "word": 1}, unk_token="word"))
    save(tmp_path / "mine.ckpt", LanguageModel(tiny_gpt(n_layers=1, context_length=5), tokenizer))
    done = certify("ckpt=mine.ckpt", "device=cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "weights=trained" in done.stderr and "mine.ckpt sees no future" in done.stdout
    assert (tmp_path / "causality.json").exists() and (tmp_path / "causality.png").exists()


def test_a_function_is_certified_or_not(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def table():\n"
        "    return torch.randn(7, 7, generator=torch.Generator().manual_seed(0))\n"
        "def past(ids):\n"
        "    return table()[ids].cumsum(1)\n"
        "def future(ids):\n"
        "    return table()[ids].flip(1).cumsum(1).flip(1)\n"
    )
    sizes = ["vocab_size=7", "context_length=12", "device=cpu"]
    assert certify("call=mine:past", *sizes, cwd=tmp_path).returncode == 0
    done = certify("call=mine:future", *sizes, cwd=tmp_path)
    assert done.returncode == 1 and "no future: by perturbation: query 0 changes with key 1" in done.stdout


def test_a_transformers_folder_is_certified(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=31, n_positions=12, n_layer=1, n_embd=16, n_head=2, bos_token_id=None, eos_token_id=None
    )
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "theirs")
    done = certify("hf=theirs", "device=cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "outputs" / "causality" / "theirs" / "causality.png").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.n_heads=5"], "model.n_heads=5 does not divide model.dim=192"),
        (["model=nanoo"], "there is no model=nanoo; did you mean nano?"),
        (["ckpt=nowhere"], "nowhere does not exist"),
        (["ckpt=latest", "model.window=3"], "ckpt=latest and model.window=3 name several models; keep one"),
        (["ckpt=latest", "hf=folder"], "ckpt=latest and hf=folder name several models"),
        (["call=os:getcwd"], "vocab_size=None must be a whole number"),
        (["call=nowhere:f", "vocab_size=7", "context_length=9"], "nowhere"),
        (["hf=./nowhere"], "nowhere"),
        (["vocab_size=7"], "go with call="),
        (["compile=true", "hf=folder"], "compile=true is for Tril's own models"),
        (["device=tpu"], "device=tpu is not available"),
        (["exhaustive=perhaps"], "exhaustive=perhaps must be true or false"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_settings_end_in_one_line(overrides, message, tmp_path):
    assert_refused(certify(*overrides, cwd=tmp_path), message)
    assert not list(tmp_path.iterdir())
