"""What evaluate, heads, sample and the pages say of a trained model, computed again from its logits and weights."""

import csv
import json
import os
import shutil
import signal

import numpy as np
import pytest
import torch
from scipy.stats import t
from selenium.webdriver import ActionChains, Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

from tests.contract.harness import Command, run
from tests.contract.test_comparisons import over_documents
from tril import load
from tril.model import MultiHeadAttention

MODEL = "model.init=gpt2", "model.mlp=none", "model.n_heads=4", "model.n_kv_heads=2"
EOT = 0  # the token that ends a text
PROMPT = "The old cat"


@pytest.fixture(scope="session")
def model(run_of, texts):
    """The folder of a run that was validated on ten of the files."""
    paths = f"data.path={texts.parent}/[0-2]*.txt", f"data.val_path={texts.parent}/3*.txt"
    return run_of(*MODEL, "trainer.max_steps=120", "trainer.val_check_interval=60", *paths)


@pytest.fixture(scope="module")
def lm(model):
    return load(model, device="cpu")


def encode(lm, folder, pattern):
    return [token for path in sorted(folder.glob(pattern)) for token in (*lm.encode(path.read_text("utf-8")), EOT)]


@torch.no_grad()
def log_probabilities(lm, ids, gate=None):
    """After each token but the last, in windows of 32 tokens that do not overlap: (N - 1, V) float64."""
    windows = torch.nn.functional.pad(torch.tensor(ids[:-1]), (0, (1 - len(ids)) % 32)).view(-1, 32)
    return lm.model(windows, head_gate=gate).double().log_softmax(-1).flatten(0, 1)[: len(ids) - 1].numpy()


def losses(lm, ids, gate=None):
    return -log_probabilities(lm, ids, gate)[range(len(ids) - 1), ids[1:]]


def ended(name, *arguments, cwd):
    return run(name, *arguments, cwd=cwd).succeeded().out.rstrip("\n")


def test_the_figures_of_an_evaluation_follow_from_the_logits(model, lm, texts, tmp_path):
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("Ein Vögelchen. The cat sees a bird.\n" * (number + 1), "utf-8")
    paths = f"data.path={texts.parent}/1*.txt", f"data.val_path={tmp_path}/*.txt"
    other = model / "checkpoints" / "previous.ckpt"
    ended("evaluate", f"ckpt={model}", f"other={other}", f"out={tmp_path}", *paths, cwd=tmp_path)
    groups, ids = [], encode(lm, tmp_path, "*.txt")
    json.loads((tmp_path / "evaluation.json").read_text("utf-8"), object_hook=lambda x: groups.append(x) or x)
    figures = {name: value for group in reversed(groups) for name, value in group.items()}  # the first of each name
    nll, logits = losses(lm, ids), log_probabilities(lm, ids)
    right, confidence = logits.argmax(1) == ids[1:], np.exp(logits.max(1))
    expected = {
        "perplexity": np.exp(nll.mean()),
        "bits_per_byte": nll.sum() / np.log(2) / sum(path.stat().st_size for path in tmp_path.glob("*.txt")),
        "accuracy": right.mean(),
        "calibration_error": np.abs(np.bincount((confidence * 15).astype(int), right - confidence)).sum() / len(nll),
    }
    assert {name: figures[name]["mean"] for name in expected} == pytest.approx(expected, rel=1e-5)
    document = np.equal(ids[:-1], EOT).cumsum()  # of each target
    sizes = np.bincount(document)
    differences = losses(load(other, device="cpu"), ids) - nll
    for name, values in (("loss", nll), ("difference", differences)):
        variance, df = over_documents(np.bincount(document, values) / sizes, sizes)
        ends = values.mean() + np.array([-1, 1]) * t.isf(0.025, df) * variance**0.5
        actual = [figures[name][end] for end in ("mean", "low", "high")]
        assert actual == pytest.approx([values.mean(), *ends], rel=1e-5), name


@torch.no_grad()
def attention_maps(lm, windows):
    """Tokens (B, T) to weights (L, B, H, T, T)."""
    calls, modules = [], [module for module in lm.model.modules() if isinstance(module, MultiHeadAttention)]
    hooks = [m.register_forward_hook(lambda *call: calls.append(call), with_kwargs=True) for m in modules]
    lm.model(torch.tensor(windows))
    for hook in hooks:
        hook.remove()
    return np.stack([module(*args, **options, need_weights=True)[1] for module, args, options, _ in calls])


def test_the_losses_without_a_head_and_its_scores_follow_from_gate_and_weights(model, lm, texts, tmp_path):
    ids = encode(lm, texts.parent, "3*")
    ids = ids[: (len(ids) - 1) // 32 * 32 + 1]  # whole windows
    ended("heads", f"ckpt={model}", f"out={tmp_path}", f"windows={len(ids) // 32}", cwd=tmp_path)
    weights = attention_maps(lm, np.reshape(ids[:-1], (-1, 32))).astype(float)
    assert np.allclose(weights.sum(-1), 1, atol=1e-6) and not np.triu(weights, 1).any()
    rows = {row["head"]: row for row in csv.DictReader((tmp_path / "heads.csv").open(encoding="utf-8"))}
    for layer, head in np.ndindex(2, 4):
        row, gate = rows[f"L{layer}H{head}"], torch.ones(2, 4)
        w = weights[layer, :, head, 1:]  # of the queries that see more than themselves
        gate[layer, head] = 0
        expected = {
            "zero_change" if "zero_change" in row else "change": losses(lm, ids, gate).mean() - losses(lm, ids).mean(),
            "entropy": -np.sum(w * np.log(np.where(w > 0, w, 1)), -1).mean(),
            "previous": np.diagonal(w, 0, 1, 2).mean(),
            "first": w[..., 0].mean(),
        }
        assert {name: float(row[name]) for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_a_text_without_a_head_is_that_of_full_passes_with_its_gate_at_zero(model, lm):
    texts, gate, given = [], torch.ones(2, 4), lm.encode(PROMPT)
    for removed in ("null", "[L0H2]"):
        ids = given[:]
        while len(ids) < 31:
            ids.append(int(log_probabilities(lm, [*ids, EOT], gate)[-1].argmax()))
        options = "temperature=0", f"max_new_tokens={31 - len(given)}", f"remove_heads={removed}"
        texts.append(ended("sample", f"ckpt={model}", f"prompt={PROMPT}", *options, cwd=model))
        assert texts[-1] == lm.tokenizer.decode(ids).rstrip("\n")
        gate[0, 2] = 0
    assert texts[0] != texts[1]


@pytest.fixture
def browser():
    """Chromium. In the end, the pages have written no message and asked no other computer."""
    driver, options = shutil.which("chromedriver"), ChromeOptions()
    if driver is None and os.environ.get("TRIL_REQUIRE_BROWSER") != "1":
        pytest.skip("no chromedriver")
    options.binary_location = shutil.which("chromium")
    for option in ("headless=new", "no-sandbox", "disable-gpu", "disable-background-networking"):
        options.add_argument(f"--{option}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with Chrome(options=options, service=Service(driver)) as chrome:
        yield chrome
        assert chrome.get_log("browser") == []
        events = [json.loads(event["message"])["message"] for event in chrome.get_log("performance")]
    urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert urls and all(url.startswith(("data:", "file:", "http://127.0.0.1:")) for url in urls), urls


@pytest.mark.slow
def test_the_pages_show_the_weights_of_each_head_and_the_texts_of_sample(model, lm, tmp_path, browser):
    def shown_weights(token):  # while the mouse points at it
        ActionChains(browser).move_to_element(token).perform()
        titles = [each.get_attribute("title") for each in find(".token")]
        return [float(title.removeprefix("weight ")) for title in titles if title]

    def find(selector):
        return browser.find_elements("css selector", selector)

    def text(button):
        find(button)[0].click()
        WebDriverWait(browser, 30).until(lambda _: " tokens, " in find(".status")[0].text)
        shown = find(".text")[0].get_property("textContent")
        return shown.removesuffix("<|endoftext|>").replace("↵", "").rstrip("\n")

    ended("heads", f"ckpt={model}", f"out={tmp_path}", "windows=9", f"prompt={PROMPT}", cwd=tmp_path)
    browser.get((tmp_path / "attention.html").as_uri())
    maps = attention_maps(lm, [lm.encode(PROMPT)])
    for layer, head in ((0, 3), (1, 0)):
        find(f"button[title=L{layer}H{head}]")[0].click()
        for query, token in enumerate(find(".token")):
            shown = shown_weights(token)  # three digits of float16
            assert np.allclose(shown, maps[layer, 0, head, query], atol=5e-4 + 2**-11)
    server = Command("play", f"ckpt={model}", "port=0", cwd=tmp_path)
    try:
        browser.get(WebDriverWait(server, 60).until(lambda _: server.files[0].read_text()))
        for name, value in (("#prompt", PROMPT), ("#max_new_tokens", "60")):
            find(name)[0].clear()
            find(name)[0].send_keys(value)
        texts = [text("#generate")]
        find(".strip[title=L1H2]")[0].click()
        weights = shown_weights(find(".token[role=button]")[5])
        assert len(weights) == len(lm.encode(PROMPT)) + 5 and sum(weights) == pytest.approx(1, abs=0.006)
        texts.append(text(".switch[title=L0H0]"))
    finally:
        os.kill(server.process.pid, signal.SIGINT)
        server.done(20).succeeded()
    options = f"ckpt={model}", f"prompt={PROMPT}", "max_new_tokens=60"
    assert texts[0] != texts[1]
    assert texts == [ended("sample", *options, f"remove_heads={heads}", cwd=tmp_path) for heads in ("null", "[L0H0]")]
