"""scripts/evaluate.py: the run's own text and another one; lm_eval on an exported model."""

import json
import math
import shutil
import sys

import pytest
import torch

from tests.conftest import tiny_gpt
from tests.contract.harness import run
from tril.data.tokenizer import TokenizerConfig, build
from tril.model.checkpoint import read_state, save, write_state
from tril.model.generation.language_model import LanguageModel

T = 12  # context length of tiny_gpt
BYTES = build(TokenizerConfig(kind="byte"), ())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory with models of bytes: a uniform one and random ones."""
    folder = tmp_path_factory.mktemp("evaluate")
    torch.manual_seed(0)
    save(folder / "random.ckpt", LanguageModel(tiny_gpt(vocab_size=320), BYTES))
    save(folder / "future.ckpt", LanguageModel(tiny_gpt(vocab_size=320, causal=False), BYTES))
    model = tiny_gpt(vocab_size=320)
    torch.nn.init.zeros_(model.head.weight)
    save(folder / "uniform.ckpt", LanguageModel(model, BYTES))
    return folder


@pytest.fixture
def evaluate(folder, trained):
    cache = str(trained.parents[2] / "cache")  # with the prepared text of the run
    return lambda *arguments: run("evaluate", *arguments, "device=cpu", cwd=folder, strict=True, TRIL_CACHE=cache)


@pytest.fixture
def evaluated(evaluate, tmp_path):
    """A function: the JSON file, and what was printed."""

    def evaluated(*arguments):
        done = evaluate(*arguments, f"out={tmp_path}").succeeded()
        path = max(tmp_path.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail), done.stdout

    return evaluated


def test_the_text_is_that_of_the_run_or_another_one_whose_first_token_is_no_target(evaluated, trained, texts):
    """Each target of a uniform model costs ln V. The first token is here one byte."""
    report, stdout = evaluated(f"ckpt={trained}")
    summary = json.loads((trained / "summary.json").read_text())
    for figure, name in (("loss", "final_val_loss"), ("bits_per_byte", "final_val_bpb")):
        assert report["figures"][figure]["mean"] == pytest.approx(summary[name], rel=1e-6)
    assert f"{report['figures']['bits_per_byte']['mean']:.4f} [" in stdout and "validation part of the run" in stdout
    report, stdout = evaluated("ckpt=random.ckpt", "other=uniform.ckpt", "data=files", f"data.path={texts}", "part=all")
    n_bytes, other = sum(path.stat().st_size for path in texts.parent.glob("*.txt")), report["other"]
    assert report["text"]["bytes"] == other["text"]["bytes"] == n_bytes and other["observations"]["clusters"] == 40
    assert (other["targets"], other["windows"]) == (n_bytes + 39, -(-(n_bytes + 39) // T))  # and the ends of texts
    bits = math.log2(320) * other["targets"] / (n_bytes - 1)
    assert other["figures"]["bits_per_byte"]["mean"] == pytest.approx(bits, abs=1e-6)
    row, difference = (
        report["other_minus_checkpoint"]["bits per byte"],
        bits - report["figures"]["bits_per_byte"]["mean"],
    )
    assert row["difference"]["mean"] == pytest.approx(difference, abs=1e-5)
    assert row["verdict"] == "better" and "\nother: uniform.ckpt, " in stdout


def test_a_loss_that_would_be_false_is_refused_and_leaves_nothing(evaluate, folder, trained, texts):
    files = ("data=files", f"data.path={texts.parent}/01.txt")
    content = read_state(trained / "checkpoints" / "last.ckpt")
    content["tril"]["data"]["fingerprint"] = "0123456789abcdef"
    shutil.copytree(trained, folder / "changed")
    write_state(folder / "changed/checkpoints/last.ckpt", content)
    before = set(folder.iterdir())
    for arguments, message in (
        (["ckpt=random.ckpt", *files, "data.tokenizer.kind=byte"], "data.tokenizer.kind=byte has no effect on evalu"),
        ([f"ckpt={trained}", "other=random.ckpt", *files, "part=all"], "other=random.ckpt"),
        (["ckpt=future.ckpt", *files], "future.ckpt has model.causal=false, so its losses use"),
        (["ckpt=changed/checkpoints/last.ckpt"], "instead of 0123456789ab); restore it, or train again"),
    ):
        evaluate(*arguments, "out=none").refused(message)
    assert set(folder.iterdir()) == before


TASK = {"task": "my_choice", "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "choices"}
TASK |= {"doc_to_target": "answer", "target_delimiter": "", "metric_list": [{"metric": "acc"}]}
CHOICES = [  # each byte costs the same: the shortest choice wins
    {"q": "2 + 2 = ", "choices": ["five", "4", "a text w"], "answer": 1},
    {"q": "A question that is longer than the context of the model:", "choices": [" Bee", " A"], "answer": 0},
]


@pytest.mark.slow
def test_lm_eval_runs_its_tasks_on_the_exported_model(folder, monkeypatch):
    evaluator = pytest.importorskip("lm_eval.evaluator", reason='pip install -e ".[eval]"')
    run("export", "ckpt=uniform.ckpt", "to=hf", "out=exported", cwd=folder).succeeded()
    data = folder / "choices.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in CHOICES), encoding="utf-8")
    files = {"dataset_path": "json", "test_split": "test", "dataset_kwargs": {"data_files": {"test": str(data)}}}
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder / "modules"))
    monkeypatch.setattr(sys.modules["datasets"].config, "HF_DATASETS_CACHE", folder / "datasets")
    model = {"pretrained": str(folder / "exported"), "trust_remote_code": True}
    found = evaluator.simple_evaluate("hf", model_args=model, tasks=[TASK | files], device="cpu")
    assert found["results"]["my_choice"]["acc,none"] == 1 / 2
