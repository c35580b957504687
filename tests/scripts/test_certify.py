"""scripts/certify.py from the command line: what it writes, how it reports a leak, its exit status."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models

from tests.calls import call
from tests.conftest import assert_refused, run_python, tiny_gpt
from tril.model.checkpoint import save
from tril.model.generation.language_model import LanguageModel
from tril.scripts.certify import main
from tril.scripts.cli.config import CONFIGS

SMALL = ["model.n_layers=1", "model.dim=16", "model.n_heads=2", "model.context_length=9", "device=cpu"]


def certify(*overrides, cwd):
    return call(main, *overrides, cwd=cwd, strict=True)


def test_a_fresh_model_is_certified(tmp_path):
    """In a new process, without warnings."""
    script = CONFIGS.parent / "scripts" / "certify.py"
    done = run_python(script, *SMALL, "model.window=3", "out=here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("nano: causal: ") and "; uses at most the last 3 tokens\n" in done.stdout
    assert all(line.startswith(("weights=", "mode=training")) for line in done.stderr.splitlines())
    written = json.loads((tmp_path / "here" / "causality.json").read_text())
    lengths = {result["length"] for result in written["results"]}
    assert written["passed"] and {1, 2, 3, 8, 9} <= lengths <= set(range(1, 10))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here"]


def test_a_model_without_mask_fails_with_the_place_of_its_first_leak(tmp_path):
    done = certify(*SMALL, "model.causal=false", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "FAILED  future: output 0 depends on input 1, first in blocks.0.attn" in done.stdout
    assert "nano: NOT causal: output 0 depends on input 1" in done.stdout
    assert json.loads((tmp_path / "outputs" / "causality" / "nano" / "causality.json").read_text())["passed"] is False


def test_compiling_without_a_compiler_is_refused(monkeypatch, tmp_path):
    """The folder of compiled code is chosen before, so that it is found without compiling anything."""
    monkeypatch.setenv("TRIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("CXX", "no-such-compiler")
    done = certify(*SMALL, "compile=true", cwd=tmp_path / "empty")
    assert_refused(done, "compiling for cpu needs a compiler")
    assert done.environment["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "compiled")
    assert not list((tmp_path / "empty").iterdir())


def test_a_checkpoint_is_certified_in_its_folder(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "word": 1}, unk_token="word"))
    save(tmp_path / "model.ckpt", LanguageModel(tiny_gpt(n_layers=1, context_length=5), tokenizer))
    done = certify("ckpt=model.ckpt", "device=cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "weights=own" in done.stderr and "model.ckpt: causal: " in done.stdout
    assert (tmp_path / "causality.json").exists()


def test_a_function_is_certified_or_not(tmp_path):
    (tmp_path / "mymodels.py").write_text(
        "import torch\n"
        "def table():\n"
        "    return torch.randn(7, 7, generator=torch.Generator().manual_seed(0))\n"
        "def past(ids):\n"
        "    return table()[ids].cumsum(1)\n"
        "def future(ids):\n"
        "    return table()[ids].flip(1).cumsum(1).flip(1)\n"
    )
    sizes = ["vocab_size=7", "context_length=12", "device=cpu"]
    assert certify("call=mymodels:past", *sizes, cwd=tmp_path).returncode == 0
    done = certify("call=mymodels:future", *sizes, cwd=tmp_path)
    assert done.returncode == 1 and "future: output 0 depends on input 1" in done.stdout


def test_positions_before_its_own_are_the_receptive_field_of_a_function(tmp_path):
    (tmp_path / "pair.py").write_text(
        "import torch\n"
        "table = torch.randn(7, 7, generator=torch.Generator().manual_seed(0))\n"
        "def last_two(ids):\n"
        "    x = table[ids]\n"
        "    return x + 2 * torch.nn.functional.pad(x, (0, 0, 1, -1))\n"
    )
    sizes = ["call=pair:last_two", "vocab_size=7", "context_length=12", "device=cpu"]
    assert certify(*sizes, "receptive_field=1", cwd=tmp_path).returncode == 0
    done = certify(*sizes, "receptive_field=2", cwd=tmp_path)
    assert done.returncode == 1 and "receptive field: output 11 does not depend on input 9" in done.stdout


def test_a_model_without_float64_is_certified(tmp_path):
    from transformers import XGLMConfig

    sizes = {"vocab_size": 31, "d_model": 16, "ffn_dim": 32, "num_layers": 1, "attention_heads": 2}
    XGLMConfig(**sizes, max_position_embeddings=6).to_json_file(tmp_path / "xglm.json")
    done = certify("hf=xglm.json", "device=cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_difference_of_rounding_size_without_float64_is_inconclusive(tmp_path):
    (tmp_path / "rounding.py").write_text(
        "import torch\n"
        "table = torch.randn(7, 7, generator=torch.Generator().manual_seed(0))\n"
        "def shifted(ids):\n"
        "    assert torch.zeros(1).dtype == torch.float32\n"  # it does not run in float64
        "    x = table[ids].cumsum(1)\n"
        "    shift = ids.amax(1)[:, None, None] * 0.37\n"  # of all tokens, and subtracted again
        "    return (x + shift) - shift\n"
    )
    sizes = ["call=rounding:shifted", "vocab_size=7", "context_length=12", "device=cpu"]
    done = certify(*sizes, cwd=tmp_path)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "inconclusive" in done.stdout and "\nnote: outputs differ by " in done.stdout


def test_a_model_that_cannot_be_called_is_one_line(tmp_path, monkeypatch):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2Config(vocab_size=31, n_positions=6, n_layer=1, n_embd=16, n_head=2).to_json_file(tmp_path / "gpt2.json")
    monkeypatch.setattr(GPT2LMHeadModel, "forward", lambda self, input_ids: 1 / 0)
    done = certify("hf=gpt2.json", "device=cpu", cwd=tmp_path)
    message = "error: gpt2.json raised ZeroDivisionError: division by zero\n"
    assert (done.returncode, done.stdout, done.stderr) == (3, "", message)
    forward = lambda self, input_ids, **_: (torch.rand(*input_ids.shape, 31) if len(input_ids) < 3 else 1 / 0,)  # noqa: E731
    monkeypatch.setattr(GPT2LMHeadModel, "forward", forward)
    done = certify("hf=gpt2.json", "device=cpu", "out=here", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.splitlines()[-1] == "error: gpt2.json raised ZeroDivisionError: division by zero"


def test_a_transformers_folder_is_certified(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=31, n_positions=12, n_layer=1, n_embd=16, n_head=2, bos_token_id=None, eos_token_id=None
    )
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "saved")
    done = certify("hf=saved", "device=cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "outputs" / "causality" / "saved" / "causality.json").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.n_heads=5"], "model.n_heads=5"),
        (["model=nanoo"], "there is no model=nanoo; did you mean nano?"),
        (["ckpt=nowhere"], "nowhere does not exist"),
        (["ckpt=latest", "model.window=3"], "ckpt=latest and model.window=3 name several models; keep one"),
        (["ckpt=latest", "hf=folder"], "ckpt=latest and hf=folder name several models"),
        (["call=os:getcwd"], "vocab_size=None must be an integer of at least 3"),
        (["call=nowhere:f", "vocab_size=7", "context_length=9"], "nowhere"),
        (["hf=./nowhere"], "nowhere"),
        (["vocab_size=7"], "vocab_size, context_length, receptive_field go with call=..."),
        (["compile=true", "hf=folder"], "compile=true needs one of Tril's own models"),
        (["device=tpu"], "device=tpu is not available"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_settings_end_in_one_line(overrides, message, tmp_path):
    assert_refused(certify(*overrides, cwd=tmp_path), message)
    assert not list(tmp_path.iterdir())
