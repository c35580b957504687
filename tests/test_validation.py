"""The losses of a validation against a loop over the targets."""

import json

import numpy as np
import pytest
import torch
import yaml

from tests.contract.harness import BARE, merged, run, summary
from tril.data.config import parse
from tril.data.datamodule import TextDataModule
from tril.model.runs import load

T = 32  # tokens of a window
SETTINGS = merged(BARE, "data.tokenizer.kind=byte", "data.path=docs", "data.val_batch_size=4", "hydra.run.dir=run")


@pytest.fixture
def documents(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "docs").mkdir()
    for d in range(40):
        lines = (f"café {d}: line {i}, product {d * i}, sum {d + i}.\n" for i in range(9))
        (tmp_path / "docs" / f"{d}.txt").write_text("".join(lines), encoding="utf-8")


def test_the_losses_of_windows_and_documents_are_those_of_a_loop_over_the_targets(documents, tmp_path):
    run("train", *SETTINGS, cwd=tmp_path).succeeded()
    folder, result = tmp_path / "run", summary(tmp_path / "run")
    config = parse(yaml.safe_load((folder / "config.yaml").read_text())["data"])
    lm, text = load(folder / "checkpoints/last.ckpt"), config.prepare()
    ids = text.tokens("val").astype(int)
    n_targets = len(ids) - 1
    windows = torch.nn.functional.pad(torch.from_numpy(ids), (0, -len(ids) % T)).view(-1, T)
    with torch.no_grad():
        log_p = lm.model(windows).double().log_softmax(-1).flatten(0, 1)
    nats = np.array([-log_p[i, ids[i + 1]].item() for i in range(n_targets)])
    found, owners = np.load(folder / "windows_last.npz"), text.documents("val")[:n_targets]
    assert found["targets"].tolist() == np.bincount(np.arange(n_targets) // T).tolist()
    assert found["nll"].sum() / n_targets == pytest.approx(result["final_val_loss"], rel=1e-6)
    assert found["document_targets"].tolist() == np.bincount(owners).tolist() and max(owners) > 0
    assert found["document_nll"].tolist() == pytest.approx(np.bincount(owners, nats).tolist(), rel=1e-4)
    data = TextDataModule(config, context_length=T)
    assert data.first_val_windows(4)[0].flatten().tolist() == ids[: 4 * T].tolist()
    settings = ("ckpt=run/checkpoints/last.ckpt", "data=files", "data.path=docs", "out=out", "device=cpu")
    run("evaluate", *settings, cwd=tmp_path).succeeded()
    loss = json.loads((tmp_path / "out/evaluation.json").read_text())["figures"]["loss"]["mean"]
    assert loss == pytest.approx(result["final_val_loss"], rel=1e-5)
