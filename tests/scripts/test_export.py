"""scripts/export.py: the folder of a run, and what it refuses without leaving anything behind."""

import errno
import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.calls import call
from tests.conftest import assert_refused, tiny_gpt
from tests.model.interop.folders import EOT, byte_tokenizer
from tests.runs import TINY, in_process
from tril.model.checkpoint import load, save
from tril.model.generation.language_model import LanguageModel
from tril.model.interop import hf_check, hf_folder
from tril.model.interop.hf_folder import read_hf
from tril.scripts.export import main

FILES = {
    *("README.md", "certificate.json", "config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json"),
}


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "runs" / "model.ckpt"
    model = tiny_gpt(vocab_size=264, mlp="swiglu", qk_norm="none")
    save(path, LanguageModel(model, byte_tokenizer(), EOT), fingerprint="f00")
    return path


def export(checkpoint, *arguments, cwd):
    return call(main, f"ckpt={checkpoint}", *arguments, cwd=cwd)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_of_save(tmp_path, checkpoint):
    done = export(checkpoint, "out=a folder, new", "license=apache-2.0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "a folder, new"
    text = f"{folder}: LlamaForCausalLM, equal to {checkpoint} in logits and greedy text\n"
    assert done.stdout == text and set(left(folder)) == FILES and set(left(tmp_path)) == {"runs", folder.name}
    certificate = json.loads((folder / "certificate.json").read_text())
    weights = load_file(folder / "model.safetensors")
    digests = {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in weights.items()}
    assert certificate["sha256"] == digests and certificate["causality"] is None
    assert certificate["stored_certificate"]["text"] == "none"
    card = (folder / "README.md").read_text()
    assert "license: apache-2.0\n" in card and "# a folder, new\n" in card and "| data fingerprint | f00 |" in card
    modes = {path.stat().st_mode for path in folder.iterdir()}
    assert len(modes) == 1


def test_an_empty_folder_is_filled_and_a_full_one_is_refused(tmp_path, checkpoint):
    folder = tmp_path / "out"
    folder.mkdir()
    assert export(checkpoint, "out=out", cwd=tmp_path).returncode == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert_refused(
        export(checkpoint, "out=out", cwd=tmp_path), "out=out exists and is not an empty folder; name a new one"
    )
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "out is missing; name a new folder with out=FOLDER"),
        (["out=new", "to=onnx"], "to=onnx must be 'hf' or 'gguf'"),
        (["out=new", "license=MIT license"], "license="),
        (["out=runs/model.ckpt"], "out=runs/model.ckpt exists and is not an empty folder"),
        (["out=runs/model.ckpt/below"], "cannot write to"),
        (["out=new", "ckpt=nothing"], "nothing does not exist"),
        (["out=new", "licence=mit"], "there is no setting licence; did you mean license?"),
    ],
    ids=str,
)
def test_wrong_settings(tmp_path, checkpoint, arguments, message):
    assert_refused(export(checkpoint, *arguments, cwd=tmp_path), message)
    assert left(tmp_path) == ["runs"]


def test_a_model_that_no_class_expresses(tmp_path):
    path = tmp_path / "model.ckpt"
    save(path, LanguageModel(tiny_gpt(vocab_size=264, logit_softcap=30.0), byte_tokenizer(), EOT))
    message = (
        "Qwen3ForCausalLM cannot express the model: model.logit_softcap=30.0 must be null; model.mlp=relu2 must be"
    )
    done = export(path, "out=new", cwd=tmp_path)
    assert_refused(
        done, "model.logit_softcap=30.0 must be null", "model.mlp=relu2 must be swiglu", message.split(":")[0]
    )
    assert left(tmp_path) == ["model.ckpt"]


def test_a_difference_ends_with_status_1_and_leaves_nothing(tmp_path, checkpoint, monkeypatch):
    def wrong(architecture, model):
        weights = original(architecture, model)
        weights["model.layers.0.self_attn.q_proj.weight"].neg_()
        return weights

    original = hf_folder.to_theirs
    monkeypatch.setattr(hf_folder, "to_theirs", wrong)
    done = export(checkpoint, "out=new", cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and done.stdout == ""
    assert done.stderr.startswith(f"error: {checkpoint} was not exported: in transformers its logits differ by ")
    assert left(tmp_path) == ["runs"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_a_failed_write_leaves_nothing(tmp_path, checkpoint, monkeypatch, code):
    def fails(folder, lm):
        (folder / "config.json").write_text("{}")
        raise OSError(code, "the reason", str(folder / "config.json"))

    monkeypatch.setattr(hf_folder, "write_hf", fails)
    assert_refused(
        export(checkpoint, "out=new", cwd=tmp_path), f"cannot write {tmp_path / 'new'} (the reason); free space"
    )
    assert left(tmp_path) == ["runs"]


def test_an_interrupted_export_leaves_nothing(tmp_path, checkpoint, monkeypatch):
    def stop(folder, lm):
        raise KeyboardInterrupt

    monkeypatch.setattr(hf_check, "difference", stop)
    with pytest.raises(KeyboardInterrupt):
        export(checkpoint, "out=new", cwd=tmp_path)
    assert left(tmp_path) == ["runs"]


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["gpt2", "llama", "qwen3"])
def test_a_run_of_a_preset(tmp_path, text, preset):
    """Train 40 steps, export, load with transformers, import again, certify."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tril.scripts import certify

    sizes = ["model.vocab_size=320", "trainer.max_steps=40", "trainer.val_check_interval=20", "hydra.run.dir=run"]
    done = in_process(*TINY, f"model={preset}", f"data.path={text}", *sizes, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = call(main, "ckpt=run", "out=hf", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lm, ids = load(tmp_path / "run"), torch.randint(300, (2, 32))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        assert torch.equal(read_hf(tmp_path / "hf").model(ids), lm.model(ids))
        assert (theirs(ids).logits - lm.model(ids)).abs().max() <= 1e-4
    start = tokenizer("line 7: the", return_tensors="pt")
    generated = theirs.generate(**start, do_sample=False, max_new_tokens=12)[0, start.input_ids.shape[1] :]
    assert tokenizer.decode(generated) == lm.generate("line 7: the", 12, temperature=0.0)
    card = (tmp_path / "hf" / "README.md").read_text()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert f"| bits per byte | {summary['best_val_bpb']:.4f} |" in card
    assert "| causality certificate | passed at step " in card
    assert json.loads((tmp_path / "hf" / "certificate.json").read_text())["stored_certificate"]["belongs"] is True
    back, state = read_hf(tmp_path / "hf").model.state_dict(), lm.model.state_dict()
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)
    if preset != "gpt2":  # tests/test_round_trip.py certifies one
        done = call(certify.main, "hf=hf", "device=cpu", cwd=tmp_path)
        assert done.returncode == 0 and "stored certificate: passed; belongs to these weights" in done.stdout
