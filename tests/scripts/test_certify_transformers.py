"""scripts/certify_transformers.py: verdicts on classes of `transformers`, its files, and classes that hang or crash."""

import functools
import itertools
import json
import multiprocessing
import os
import time

import pytest
import torch
import transformers
from transformers.models.gpt2 import modeling_gpt2

from tests.calls import call
from tests.conftest import assert_refused, run_python
from tril.model.causality import certificate, class_verdict
from tril.model.causality.case import Result
from tril.model.causality.certificate import Certificate
from tril.model.causality.class_verdict import no_verdict, verdict
from tril.scripts import certify_transformers
from tril.scripts.certify_transformers import chosen, in_process, main
from tril.scripts.cli.compose import CONFIGS

FILE = f"transformers-{transformers.__version__}.jsonl"
HERE = ["workers=0", "out=field"]


@pytest.fixture
def first_case(monkeypatch):
    """The first case alone, which is the model with random weights, and a canary test of few steps."""
    cases = class_verdict.model_cases
    monkeypatch.setattr(class_verdict, "model_cases", lambda *a, **k: itertools.islice(cases(*a, **k), 1))
    monkeypatch.setattr(certificate, "canary", functools.partial(certificate.canary, steps=5))


def fail(*args, **inputs):
    raise RuntimeError("several\nlines")


def without_cache(forward):
    @functools.wraps(forward)
    def wrapped(self, *args, use_cache=None, **inputs):
        return fail() if use_cache else forward(self, *args, use_cache=False, **inputs)

    return wrapped


def without_mask(config, inputs_embeds, **others):
    return torch.ones(1, 1, *[inputs_embeds.shape[1]] * 2, dtype=torch.bool)


def records(folder):
    lines = (folder / "field" / FILE).read_text(encoding="utf-8").splitlines()
    return {record["class"]: record for record in map(json.loads, lines)}


@pytest.mark.usefixtures("first_case")
def test_verdicts(tmp_path, monkeypatch):
    monkeypatch.setattr(modeling_gpt2, "create_causal_mask", without_mask)
    monkeypatch.setattr(transformers.OPTForCausalLM, "__init__", fail)
    monkeypatch.setattr(transformers.BloomForCausalLM, "forward", fail)
    monkeypatch.setattr(transformers.GemmaForCausalLM, "forward", without_cache(transformers.GemmaForCausalLM.forward))
    done = call(main, "names=Llama,GPT2LMHeadModel,Bart,Roberta,Gemma,OPT,Bloom", *HERE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = records(tmp_path)
    assert {name: record["verdict"] for name, record in found.items() if name != "GPT2LMHeadModel"} == {
        "LlamaForCausalLM": "causal",
        "BartForCausalLM": "padding differs",  # its positions count padding tokens
        "RobertaForCausalLM": "causal",  # its positions begin after that of the padding token
        "GemmaForCausalLM": "error in decoding",
        "OPTForCausalLM": "not built",
        "BloomForCausalLM": "error",
    }
    leak = found["GPT2LMHeadModel"]["failed"]["leak"]
    assert leak.startswith("query 0 changes with key 1, first in transformer.h.0.attn"), leak
    assert found["OPTForCausalLM"]["failed"] == {"not built": "RuntimeError: several lines"}
    checks = ["repeatable", "no future", "all of the past", "decoding", "padding", "rows", "canary"]
    assert found["LlamaForCausalLM"]["tested"] == checks
    table = (tmp_path / "field" / FILE).with_suffix(".md").read_text(encoding="utf-8")
    assert "7 classes: 2 causal; 1 leak" in table and "\n| BloomForCausalLM   | error " in table
    assert [line.split(" |")[0] for line in table.splitlines() if "| decoding " in line] == ["| GemmaForCausalLM  "]


def test_a_key_of_the_past_is_no_leak():
    past, future = (
        Result("no future", "case", 16, False, 1.0, 0.5, 5, f"query 7 changes with key {key}", query=7, key=key)
        for key in (0, 9)
    )
    names = [verdict(Certificate("model", results))["verdict"] for results in ([past], [future], [past, future])]
    assert names == ["sees beyond its window", "leak", "sees beyond its window, leak"]


def test_a_second_start_judges_what_has_no_verdict(tmp_path, monkeypatch):
    (tmp_path / "field").mkdir()
    before = {"GPT2LMHeadModel": "leak", "OPTForCausalLM": "not built", "BloomForCausalLM": "error"}
    lines = [json.dumps({"class": name} | no_verdict(kind, "why") | {"seconds": 1.0}) for name, kind in before.items()]
    (tmp_path / "field" / FILE).write_text("\n".join([*lines, '{"class": "Lla']) + "\n", encoding="utf-8")
    judged = []

    def judge(name):
        judged.append(name)
        return {"class": name, "verdict": "causal", "failed": {}, "tested": [], "notes": [], "seconds": 2.0}

    monkeypatch.setattr(class_verdict, "judge", judge)
    done = call(main, "names=GPT2,OPT,Llama,Bloom", *HERE, cwd=tmp_path)
    assert judged == ["OPTForCausalLM", "LlamaForCausalLM", "BloomForCausalLM"]
    assert done.stdout.splitlines()[-2] == "4 classes: 3 causal; 1 leak"


def test_every_class_of_the_mapping_is_found():
    names = chosen(None)
    mapped = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.values()
    flat = {c.__name__ for classes in mapped for c in (classes if isinstance(classes, tuple) else (classes,))}
    assert flat <= set(names) and "Mistral4ForCausalLM" in names and not any(n.startswith("Auto") for n in names)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["names=Lama"], "names=Lama is no causal language model of transformers; did you mean Llama?"),
        (["seconds=0"], "seconds"),
        (["workers=-1"], "workers"),
        (["out=file/below"], "cannot write to file/below"),
    ],
)
def test_wrong_settings(overrides, message, tmp_path):
    (tmp_path / "file").touch()
    assert_refused(call(main, *overrides, cwd=tmp_path), message)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="the child has what the test patches")
@pytest.mark.parametrize(
    ("child", "message"),
    [
        (lambda name, sender: os._exit(7), "its process ended with status 7"),
        (lambda name, sender: time.sleep(60), "no verdict within 0.3 s; set seconds to more"),
    ],
)
def test_a_class_that_crashes_or_hangs_gets_no_verdict(child, message, monkeypatch):
    monkeypatch.setattr(certify_transformers, "send_verdict", child)
    started = time.perf_counter()
    record = in_process("GPT2LMHeadModel", multiprocessing.get_context("fork"), seconds=0.3)
    assert record["verdict"] == "error" and record["failed"] == {"error": message}
    assert time.perf_counter() - started < 5


@pytest.mark.slow
def test_classes_in_processes_with_the_whole_grid(tmp_path):
    script = CONFIGS.parent / "scripts" / "certify_transformers.py"
    done = run_python(script, "names=Qwen3Moe,CTRL,Gemma3,Falcon,DiffLlama", "workers=2", "out=field", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = records(tmp_path)
    assert len(found) == 5 and {record["verdict"] for record in found.values()} == {"causal"}, done.stdout
