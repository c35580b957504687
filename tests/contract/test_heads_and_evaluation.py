"""What evaluate says of a trained model, computed again from its logits."""

import json

import numpy as np
import pytest
import torch
from scipy.stats import t

from tests.contract.harness import run
from tests.oracles import cr2
from tril.model import load

MODEL = "model.init=gpt2", "model.mlp=none", "model.n_heads=4", "model.n_kv_heads=2"
EOT = 0  # the token that ends a text


@pytest.fixture(scope="session")
def model(run_of, texts):
    """The folder of a run that was validated on ten of the files."""
    paths = f"data.path={texts.parent}/[0-2]*.txt", f"data.val_path={texts.parent}/3*.txt"
    steps = "trainer.max_steps=120", "trainer.val_check_interval=60", "optim.betas=[0.9,0.95]"
    return run_of(*MODEL, *steps, *paths)


@pytest.fixture(scope="module")
def lm(model):
    return load(model, device="cpu")


def encode(lm, folder, pattern):
    return [token for path in sorted(folder.glob(pattern)) for token in (*lm.encode(path.read_text("utf-8")), EOT)]


@torch.no_grad()
def log_probabilities(lm, ids):
    """After each token but the last, in windows of 32 tokens that do not overlap: (N - 1, V) float64."""
    windows = torch.nn.functional.pad(torch.tensor(ids[:-1]), (0, (1 - len(ids)) % 32)).view(-1, 32)
    return lm.model(windows).double().log_softmax(-1).flatten(0, 1)[: len(ids) - 1].numpy()


def losses(lm, ids):
    return -log_probabilities(lm, ids)[range(len(ids) - 1), ids[1:]]


def ended(name, *arguments, cwd):
    return run(name, *arguments, cwd=cwd).succeeded().stdout.rstrip("\n")


def test_the_figures_of_an_evaluation_follow_from_the_logits(model, lm, texts, tmp_path):
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("Ein Vögelchen. The cat sees a bird.\n" * (number + 1), "utf-8")
    paths = f"data.path={texts.parent}/1*.txt", f"data.val_path={tmp_path}/*.txt"
    content, other = torch.load(model / "checkpoints" / "last.ckpt", weights_only=True), tmp_path / "other.ckpt"
    content["state_dict"]["model.norm.weight"].mul_(torch.linspace(0.8, 1.2, 32))
    torch.save(content, other)
    ended("evaluate", f"ckpt={model}", f"other={other}", f"out={tmp_path}", *paths, cwd=tmp_path)
    groups, ids, n_bytes = [], encode(lm, tmp_path, "*.txt"), sum(p.stat().st_size for p in tmp_path.glob("*.txt"))
    json.loads((tmp_path / "evaluation.json").read_text("utf-8"), object_hook=lambda x: groups.append(x) or x)
    figures = {name: value for group in reversed(groups) for name, value in group.items()}  # the first of each name
    nll, logits = losses(lm, ids), log_probabilities(lm, ids)
    expected = {
        "perplexity": np.exp(nll.mean()),
        "bits_per_byte": nll.sum() / np.log(2) / (n_bytes - len(lm.token_text(ids[0]))),  # the first one is no target
        "accuracy": (logits.argmax(1) == ids[1:]).mean(),
    }
    assert {name: figures[name]["mean"] for name in expected} == pytest.approx(expected, rel=1e-5)
    document = np.equal(ids[:-1], EOT).cumsum()  # of each target
    sizes = np.bincount(document)
    differences = losses(load(other, device="cpu"), ids) - nll
    for name, values in (("loss", nll), ("difference", differences)):
        variance, df = cr2(np.bincount(document, values) / sizes, sizes)
        ends = values.mean() + np.array([-1, 1]) * t.isf(0.025, df) * variance**0.5
        actual = [figures[name][end] for end in ("mean", "low", "high")]
        assert actual == pytest.approx([values.mean(), *ends], rel=1e-5), name
