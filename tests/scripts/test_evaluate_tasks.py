"""evaluate.py tasks=: the metrics of a task defined here, against one forward pass for each text, and refusals."""

import json
import sys

import pytest
import torch

from tests.calls import call
from tests.conftest import assert_refused, tiny_gpt
from tests.model.interop.folders import EOT, byte_tokenizer
from tril.model.checkpoint import save
from tril.model.generation.language_model import LanguageModel
from tril.scripts.evaluate import main

CHOICE = """
task: my_choice
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
CHOICES = [
    {"q": "2 + 2 = ", "choices": ["4", "five", "a text with many tokens"], "answer": 0},
    {"q": "The sky is ", "choices": ["blue", "green and red"], "answer": 1},
    {"q": "", "choices": ["Yes", "No"], "answer": 0},
    {"q": "A question that is longer than the context of the model:", "choices": [" A", " B"], "answer": 1},
    {"q": "Caf\u00e9", "choices": [" au lait", "!"], "answer": 1},
]


@pytest.fixture(scope="module")
def lm():
    return LanguageModel(tiny_gpt(vocab_size=264, context_length=24), byte_tokenizer(), EOT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, lm):
    """A checkpoint, and a folder of tasks with their data."""
    pytest.importorskip("lm_eval", reason='pip install "tril[eval]"')
    folder = tmp_path_factory.mktemp("eval")
    save(folder / "model.ckpt", lm)
    (folder / "tasks").mkdir()
    data = folder / "choices.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in CHOICES), encoding="utf-8")
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    settings = "\n".join(f"{key}: {json.dumps(value)}" for key, value in source.items())
    (folder / "tasks" / "my_choice.yaml").write_text(f"{CHOICE.strip()}\n{settings}\n", encoding="utf-8")
    return folder


def run(folder, *arguments):
    """Runs the script with the tasks of the folder alone: reading the thousands of lm_eval takes seconds."""
    from lm_eval.tasks import TaskManager

    own = TaskManager(include_path=folder / "tasks", include_defaults=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.tasks.TaskManager", lambda include_path: own)
        if "datasets" in sys.modules:  # else HF_HOME decides
            patch.setattr(sys.modules["datasets"].config, "HF_DATASETS_CACHE", folder / "cache" / "datasets")
        return call(main, "ckpt=model.ckpt", *arguments, cwd=folder, HF_HOME=str(folder / "cache"))


@torch.no_grad()
def choice_score(lm, question, choice) -> float:
    """One pass; a space at the end of the question counts as the start of the choice, as in lm_eval's own models."""
    question, choice = question.rstrip(), question[len(question.rstrip()) :] + choice
    before, after = (byte_tokenizer().encode(text).ids for text in (question, choice))  # each byte is a token
    ids = [*(before or [lm.eot_id]), *after][-25:]
    logs = lm.model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    return sum(logs[i - 1, ids[i]].item() for i in range(len(ids) - len(after), len(ids)))


def test_the_metrics_of_a_task(folder, lm):
    done = run(folder, "tasks=my_choice", "include_path=tasks")
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "evaluation" / "tasks.json").read_text(encoding="utf-8"))
    scores = [[choice_score(lm, row["q"], choice) for choice in row["choices"]] for row in CHOICES]
    normed = [
        [score / len(choice) for score, choice in zip(values, row["choices"], strict=True)]
        for values, row in zip(scores, CHOICES, strict=True)
    ]
    for metric, values in (("acc,none", scores), ("acc_norm,none", normed)):
        right = [row["answer"] == value.index(max(value)) for row, value in zip(CHOICES, values, strict=True)]
        assert report["results"]["my_choice"][metric] == sum(right) / len(right)
    assert [value.index(max(value)) for value in scores] != [value.index(max(value)) for value in normed]
    assert (report["checkpoint"], report["parameters"]) == ("model.ckpt", lm.model.n_parameters())
    assert "|my_choice" in done.stdout.replace(" ", "") and done.stdout.endswith("\nevaluation: tasks.json\n")
    assert run(folder, "tasks=my_choice", "include_path=tasks", "limit=1", "out=found").returncode == 0
    report = json.loads((folder / "found" / "tasks.json").read_text(encoding="utf-8"))
    assert report["n-samples"]["my_choice"] == {"original": 5, "effective": 1} and report["limit"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tasks=my_choise", "include_path=tasks"], "there is no task 'my_choise'; `lm_eval ls tasks` lists all names"),
        (["tasks=my_choice", "include_path=nothing"], "include_path=nothing is not a folder"),
        (["limit=4"], "limit=4 has no effect without tasks; leave it out"),
    ],
    ids=str,
)
def test_refused(folder, arguments, message):
    assert_refused(run(folder, *arguments), message)


def test_without_the_package(tmp_path, lm, monkeypatch):
    save(tmp_path / "model.ckpt", lm)
    for name in ("lm_eval", "lm_eval.evaluator", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, name, None)
    done = call(main, "ckpt=model.ckpt", "tasks=hellaswag", cwd=tmp_path)
    assert_refused(done, 'tasks= needs the library lm_eval; pip install "tril[eval]"')
