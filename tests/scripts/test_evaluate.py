"""scripts/evaluate.py: the run's own text, other tokenizers, minimal pairs, bits of tokens, and tasks of lm_eval."""

import html
import json
import math
import re
import shutil
import sys

import pytest
import torch

from tests.calls import call
from tests.conftest import assert_refused, tiny_gpt
from tril.data.tokenizer import TokenizerConfig, build
from tril.model.checkpoint import load, read_state, save, write_state
from tril.model.generation.language_model import LanguageModel
from tril.scripts.evaluate import main

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
def run(folder, trained):
    cache = str(trained.parents[2] / "cache")  # with the prepared text of the run
    return lambda *arguments: call(main, *arguments, "device=cpu", cwd=folder, strict=True, TRIL_CACHE=cache)


@pytest.fixture
def evaluated(run, folder):
    """A function: the JSON file, and what was printed."""

    def evaluated(*arguments):
        done = run(*arguments, "out=out")
        assert done.returncode == 0, done.stderr
        [path] = (folder / "out").glob("*.json")
        text = path.read_text(encoding="utf-8")
        shutil.rmtree(folder / "out")
        return json.loads(text, parse_constant=pytest.fail), done.stdout

    return evaluated


@torch.no_grad()
def nats(lm, ids):
    """The losses of ids after the first, in one pass."""
    log_p = lm.model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    return [-row[token].item() for row, token in zip(log_p, ids[1:], strict=True)]


def test_the_text_is_that_of_the_run_or_another_one_on_which_tokenizers_differ(evaluated, trained, texts):
    """On whole texts, each target of a uniform model costs ln V."""
    report, stdout = evaluated(f"ckpt={trained}")
    final = json.loads((trained / "summary.json").read_text())["final_val_loss"]
    assert report["figures"]["loss"]["mean"] == pytest.approx(final, abs=5e-6)
    assert [row["last"] for row in report["positions"]] == [1, 2, 4, 8, 16, 32]
    assert f"{report['figures']['bits_per_byte']['mean']:.4f} [" in stdout and "validation part of the run" in stdout
    arguments = ("data=files", f"data.path={texts}", "part=all")
    report, stdout = evaluated(f"ckpt={trained}", "other=uniform.ckpt", *arguments)
    n_bytes, other = sum(path.stat().st_size for path in texts.parent.glob("*.txt")), report["other"]
    assert report["text"]["bytes"] == other["text"]["bytes"] == n_bytes and other["observations"]["clusters"] == 40
    assert (other["targets"], other["windows"]) == (n_bytes + 39, -(-(n_bytes + 39) // T))  # and the ends of texts
    bits = math.log2(320) * other["targets"] / n_bytes
    assert other["figures"]["bits_per_byte"]["mean"] == pytest.approx(bits, abs=1e-6)
    [(unit, row)] = report["other_minus_checkpoint"].items()
    assert row["difference"]["mean"] == pytest.approx(bits - report["figures"]["bits_per_byte"]["mean"], abs=1e-5)
    assert unit == "bits per byte" and row["verdict"] == "worse" and "\nother: uniform.ckpt, " in stdout


def pair(good, bad, **others):
    return json.dumps({"good": good, "bad": bad} | others)


def test_minimal_pairs_are_scored_whole_after_end_of_text_and_ties_are_wrong(evaluated, folder):
    lines = [pair("ab", "abc", field="syntax"), "", pair("abc", "ab"), pair("ab", "ba"), pair("x", "\u00e9")]
    (folder / "pairs.jsonl").write_text("\n".join([*lines, ""]), encoding="utf-8")
    found, stdout = evaluated("ckpt=uniform.ckpt", "pairs=pairs.jsonl")  # it prefers shorter texts
    assert (found["pairs"], found["right"], found["ties"], found["accuracy"]["mean"]) == (4, 2, 1, 0.5)
    assert "accuracy 0.5000 [0.1500, 0.8500] (95 %, Wilson)" in stdout  # by the formula for 2 of 4
    texts, lm = [("one", "two"), ("a" * T, "b" * T), ("x<", "\u6f22")], load(folder / "random.ckpt")
    (folder / "pairs.jsonl").write_text("\n".join(pair(*each) for each in texts))
    found, _ = evaluated("ckpt=random.ckpt", "pairs=pairs.jsonl")
    for row, each in zip(found["nats"], texts, strict=True):
        expected = [sum(nats(lm, [lm.eot_id, *lm.encode(text)])) for text in each]
        assert [row["good"], row["bad"]] == pytest.approx(expected, abs=1e-3)


def test_what_is_refused_leaves_nothing(run, folder, trained, texts):
    files = ("data=files", f"data.path={texts.parent}/01.txt")
    content = read_state(trained / "checkpoints" / "last.ckpt")
    content["tril"]["data"]["fingerprint"] = "0123456789abcdef"
    shutil.copytree(trained, folder / "changed")
    write_state(folder / "changed/checkpoints/last.ckpt", content)
    save(folder / "abc.ckpt", LanguageModel(tiny_gpt(), build(TokenizerConfig(kind="char"), ["abc \n"])))
    (folder / "bad.jsonl").touch()
    before = set(folder.iterdir())
    for arguments, message in (
        (["ckpt=random.ckpt", *files, "data.tokenizer.kind=byte"], "data.tokenizer.kind=byte has no effect on evalu"),
        ([f"ckpt={trained}", "other=random.ckpt", *files, "part=all"], "only the same documents can be paired"),
        (["ckpt=future.ckpt", *files], "future.ckpt has model.causal=false, so its losses use"),
        (["ckpt=changed/checkpoints/last.ckpt"], "instead of 0123456789ab); restore it, or train again"),
        (["ckpt=abc.ckpt", "text=x"], "has 'x', which the tokenizer does not know; use only"),
    ):
        assert_refused(run(*arguments, "out=none"), message)
    for lines, message in (
        ([pair("a", "b"), "", '{"good": "a"}'], "pairs=bad.jsonl: line 3 must be {"),
        (["[" * 100_000], "line 1 must be {"),
        ([pair("a", "b"), pair("a" * (T + 1), "b")], "line 2 has a text of 13 tokens, more than the"),
    ):
        (folder / "bad.jsonl").write_text("\n".join(lines))
        assert_refused(run("ckpt=random.ckpt", "pairs=bad.jsonl"), message)
    assert set(folder.iterdir()) == before


def test_the_bits_of_each_token_are_those_of_windows_that_do_not_overlap(run, folder):
    text = "def caf\u00e9(x):\r\n\t<script>alert('\u6f22')</script> &lt; \x00<|endoftext|>"
    done = run("ckpt=random.ckpt", f"text={text}", "out=tokens")
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "tokens/tokens.json").read_text(encoding="utf-8"))
    lm, n = load(folder / "random.ckpt"), len(text.encode())
    # Bytes one by one: <|endoftext|> in the text is text, and not the token.
    tokens = [lm.eot_id, *(i for char in text for i in lm.tokenizer.encode(char).ids)]
    bits = [x / math.log(2) for i in range(0, n, T) for x in nats(lm, tokens[i : i + T + 1])]
    rows, total = report["tokens"], sum(bits)
    assert [row["bits"] for row in rows] == pytest.approx(bits, abs=1e-4) and len(rows) == n
    assert "".join(row["text"] for row in rows) == text
    assert (report["bits"], report["bits_per_byte"]) == pytest.approx((total, total / n), rel=1e-5)
    assert f"{total:,.1f} bits for {n} bytes and {n} tokens: {total / n:.4f} bits per byte" in done.stdout
    page = (folder / "tokens/tokens.html").read_text(encoding="utf-8")
    assert re.findall(r'title="(.*?)"', page) == [f"{row['bits']:.2f} bits" for row in rows] and "<script" not in page
    shown = "\\r\u21b5\n\u2192\t<script>alert('\u6f22\u25e6\u25e6')</script> &lt; \\x00<|endoftext|>"
    assert shown in html.unescape(re.sub("</?span.*?>", "", page))


CHOICE = """task: my_choice
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
dataset_path: json
test_split: test
"""
CHOICES = [
    {"q": "2 + 2 = ", "choices": ["five", "4", "a text w"], "answer": 1},
    {"q": "", "choices": ["N\u00e9", "Yes"], "answer": 1},
    {"q": "A question that is longer than the context of the model:", "choices": [" Bee", " A"], "answer": 1},
]


def test_the_metrics_of_a_task(folder, run, monkeypatch):
    """With the tasks of a folder alone: reading the thousands of lm_eval takes seconds."""
    tasks = pytest.importorskip("lm_eval.tasks", reason='pip install -e ".[eval]"')
    (folder / "tasks").mkdir()
    data = folder / "choices.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in CHOICES), encoding="utf-8")
    files = f"dataset_kwargs: {json.dumps({'data_files': {'test': str(data)}})}\n"
    (folder / "tasks/my_choice.yaml").write_text(CHOICE + files, encoding="utf-8")
    of_folder = tasks.TaskManager(include_path=folder / "tasks", include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda include_path: of_folder)
    monkeypatch.setattr(sys.modules["datasets"].config, "HF_DATASETS_CACHE", folder / "datasets")
    done = run("ckpt=uniform.ckpt", "tasks=my_choice", "include_path=tasks", "out=out-tasks")
    assert done.returncode == 0 and "|my_choice" in done.stdout.replace(" ", ""), done.stderr
    results = json.loads((folder / "out-tasks/tasks.json").read_text(encoding="utf-8"))["results"]["my_choice"]
    # Each byte costs the same: the shortest choice wins, and per character the one with the fewest bytes, or the first.
    assert (results["acc,none"], results["acc_norm,none"]) == (2 / 3, 1 / 3)
    assert_refused(run("ckpt=uniform.ckpt", "tasks=my_choise", "include_path=tasks"), "there is no task 'my_choise'; ")
    assert_refused(run("ckpt=uniform.ckpt", "tasks=a", "include_path=no"), "include_path=no is not a folder")
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    assert_refused(run("ckpt=uniform.ckpt", "tasks=a"), 'tasks= needs the library lm_eval; pip install -e ".[eval]"')
