"""evaluate.py tasks=: the metrics of tasks defined here, against one forward pass for each text, and refusals."""

import json
import math
import sys

import pytest
import torch

from tests.calls import call
from tests.conftest import assert_refused, tiny_gpt
from tests.model.interop.folders import EOT, byte_tokenizer
from tril.model.checkpoint import save
from tril.model.generation.language_model import LanguageModel
from tril.scripts.evaluate import main

CONTEXT = 24
CHOICE = """
task: my_choice
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ROLLING = """
task: my_rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""
GENERATE = """
task: my_generate
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["~"], max_gen_toks: 4}
metric_list: [{metric: exact_match}]
"""
CHOICES = [
    {"q": "2 + 2 = ", "choices": ["4", "five", "a text with many tokens"], "answer": 0},
    {"q": "The sky is ", "choices": ["blue", "green and red"], "answer": 1},
    {"q": "", "choices": ["Yes", "No"], "answer": 0},
    {"q": "A question that is longer than the context of the model:", "choices": [" A", " B"], "answer": 1},
    {"q": "Caf\u00e9", "choices": [" au lait", "!"], "answer": 1},
]
TEXTS = ["One line.", "A text of several words, which is longer than the context of the model.\n", "caf\u00e9"]
PROMPTS = ["ab", "2 + 2 =", "The sky"]


@pytest.fixture(scope="module")
def lm():
    model = tiny_gpt(vocab_size=264, context_length=CONTEXT)
    with torch.no_grad():
        model.head.weight[:33] = model.head.weight[94:] = 0.0  # most probable are the bytes of visible ASCII
    return LanguageModel(model, byte_tokenizer(), EOT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, lm):
    """A checkpoint, and a folder of tasks with their data."""
    pytest.importorskip("lm_eval", reason='pip install "tril[eval]"')
    folder = tmp_path_factory.mktemp("eval")
    save(folder / "model.ckpt", lm)
    (folder / "tasks").mkdir()
    prompts = [{"q": prompt, "answer": greedy(lm, prompt)} for prompt in PROMPTS[:2]] + [
        {"q": PROMPTS[2], "answer": "?"}
    ]
    for text, rows in ((CHOICE, CHOICES), (ROLLING, [{"text": text} for text in TEXTS]), (GENERATE, prompts)):
        name = text.split()[1]
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        settings = "\n".join(f"{key}: {json.dumps(value)}" for key, value in source.items())
        (folder / "tasks" / f"{name}.yaml").write_text(f"{text.strip()}\n{settings}\n", encoding="utf-8")
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


def ids_of(text: str) -> list[int]:
    """Each byte is a token."""
    return byte_tokenizer().encode(text).ids


@torch.no_grad()
def log_probabilities(lm, ids) -> torch.Tensor:
    """Of each next id: (T, V), one text in one pass."""
    assert len(ids) <= CONTEXT
    return lm.model(torch.tensor([ids]))[0].double().log_softmax(-1)


def choice_score(lm, question, choice) -> float:
    """A space at the end of the question counts as the start of the choice, as in lm_eval's own models."""
    question, choice = question.rstrip(), question[len(question.rstrip()) :] + choice
    ids, n = [*(ids_of(question) or [lm.eot_id]), *ids_of(choice)], len(ids_of(choice))
    ids = ids[-CONTEXT - 1 :]
    return sum(log_probabilities(lm, ids[:-1])[i - 1, ids[i]].item() for i in range(len(ids) - n, len(ids)))


def text_score(lm, text) -> float:
    """The first window starts with end-of-text; each other one is full, and scores what is left."""
    ids, total = [lm.eot_id, *ids_of(text)], 0.0
    for begin in range(1, len(ids), CONTEXT):
        end = min(begin + CONTEXT, len(ids))
        start = max(0, end - 1 - CONTEXT)
        logs = log_probabilities(lm, ids[start : end - 1])
        total += sum(logs[i - 1 - start, ids[i]].item() for i in range(begin, end))
    return total


def greedy(lm, prompt) -> str:
    ids = ids_of(prompt)
    for _ in range(4):
        ids.append(log_probabilities(lm, ids)[-1].argmax().item())
    return lm.tokenizer.decode(ids[-4:]).split("~")[0]


def test_the_metrics_of_three_kinds_of_tasks(folder, lm):
    done = run(folder, "tasks=my_choice,my_rolling,my_generate", "include_path=tasks", "out=found")
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "found" / "tasks.json").read_text(encoding="utf-8"))
    results = report["results"]
    scores = [[choice_score(lm, row["q"], choice) for choice in row["choices"]] for row in CHOICES]
    normed = [
        [score / len(choice) for score, choice in zip(values, row["choices"], strict=True)]
        for values, row in zip(scores, CHOICES, strict=True)
    ]
    for metric, values in (("acc,none", scores), ("acc_norm,none", normed)):
        right = [row["answer"] == value.index(max(value)) for row, value in zip(CHOICES, values, strict=True)]
        assert results["my_choice"][metric] == sum(right) / len(right)
    assert [value.index(max(value)) for value in scores] != [value.index(max(value)) for value in normed]

    total, n_bytes = sum(text_score(lm, text) for text in TEXTS), sum(len(text.encode()) for text in TEXTS)
    n_words = sum(len(text.split()) for text in TEXTS) + 1  # lm_eval counts the empty word after a final line end
    assert results["my_rolling"]["bits_per_byte,none"] == pytest.approx(-total / n_bytes / math.log(2), rel=1e-5)
    assert results["my_rolling"]["byte_perplexity,none"] == pytest.approx(math.exp(-total / n_bytes), rel=1e-5)
    assert results["my_rolling"]["word_perplexity,none"] == pytest.approx(math.exp(-total / n_words), rel=1e-4)
    assert results["my_generate"]["exact_match,none"] == pytest.approx(2 / 3)

    assert report["n-samples"]["my_choice"] == {"original": 5, "effective": 5}
    assert (report["checkpoint"], report["parameters"]) == ("model.ckpt", lm.model.n_parameters())
    for name in ("my_choice", "my_rolling", "my_generate"):
        assert f"|{name}" in done.stdout.replace(" ", "")
    assert done.stdout.startswith("model.ckpt\n") and done.stdout.endswith("\nfound: tasks.json\n")


def test_a_limit_and_the_file_in_the_folder_of_the_run(folder, lm):
    done = run(folder, "tasks=my_choice", "include_path=tasks", "limit=1")
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "evaluation" / "tasks.json").read_text(encoding="utf-8"))
    scores = [choice_score(lm, CHOICES[0]["q"], choice) for choice in CHOICES[0]["choices"]]
    assert report["results"]["my_choice"]["acc,none"] == float(scores[0] == max(scores))
    assert report["n-samples"]["my_choice"] == {"original": 5, "effective": 1} and report["limit"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tasks=my_choise"], "there is no task 'my_choise'; `lm_eval ls tasks` lists all names"),
        (["tasks=my_choice,,b"], "there is no task ''"),
        (["tasks=my_choice", "include_path=nothing"], "include_path=nothing is not a folder"),
        (["tasks=my_choice", "limit=0"], "limit=0"),
        (["tasks=my_choice", "stride=4"], "stride=4 has no effect without tasks=null; leave it out"),
        (["limit=4"], "limit=4 has no effect without tasks; leave it out"),
    ],
    ids=str,
)
def test_refused(folder, arguments, message):
    path = [] if "include_path" in str(arguments) or "tasks" not in str(arguments) else ["include_path=tasks"]
    assert_refused(run(folder, *path, *arguments), message)


def test_without_the_package(tmp_path, lm, monkeypatch):
    save(tmp_path / "model.ckpt", lm)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    done = call(main, "ckpt=model.ckpt", "tasks=hellaswag", cwd=tmp_path)
    assert_refused(done, 'tasks=hellaswag needs the library lm_eval; pip install "tril[eval]"')
