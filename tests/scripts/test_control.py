"""The control on two tiny runs of train.py: its figures, its files, and what it refuses."""

import json
import math
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
import yaml

from tests.calls import call
from tests.conftest import assert_refused, tiny_gpt
from tests.model.causality.test_mask_control import two_sides
from tests.model.test_checkpoint import rewrite
from tests.runs import rows, train_typed, typed
from tril.data.settings import build
from tril.model.checkpoint import load
from tril.model.heads.attention_maps import TokenWindows
from tril.model.intervals import clustered_mean
from tril.model.text_clusters import TextClusters
from tril.scripts.cli.compose import compose
from tril.scripts.cli.errors import message_of
from tril.scripts.cli.finished_run import read_run, validation_tokens
from tril.scripts.cli.typed import Typed
from tril.scripts.control import ControlConfig, check_pair, main, measure, table

T = 32  # context length of TINY
TABLE = """\
| nats per token                        |          masked |        unmasked |
|---------------------------------------|----------------:|----------------:|
| parameters                            |           1,234 |           1,234 |
| training loss, last logged            |          2.0000 |          0.1000 |
| validation loss, as the run logged it |          3.5000 |          3.5000 |
| one-pass loss                         | 3.0000 ± 0.1000 | 0.5000 ± 0.1000 |
| prefix-only loss                      | 3.0000 ± 0.1000 | 9.0000 ± 0.2000 |
| prefix-only minus one-pass loss       | 0.0000 ± 0.0000 | 8.5000 ± 0.3000 |
| bits per byte, one-pass               |          1.4427 |          0.2404 |
| bits per byte, prefix-only            |          1.4427 |          4.3281 |"""

OPTIONS = ["windows=4", 'prompts=["line 3", ""]', "max_new_tokens=9"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A working directory with the two runs below outputs/."""
    folder = tmp_path_factory.mktemp("control")
    (folder / "text.txt").write_text("".join(f"line {i}: the square of {i} is {i * i}.\n" for i in range(400)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIL_CACHE", str(folder / "cache"))
        for name, extra in (("masked", []), ("unmasked", ["experiment=control_no_mask"])):
            paths = [f"data.path={folder / 'text.txt'}", f"hydra.run.dir={folder / 'outputs' / name}"]
            steps = ["trainer.max_steps=40", "trainer.val_check_interval=20"]
            train_typed(typed(*paths, *extra, *steps))
        yield folder


@pytest.fixture
def runs(trained):
    return {name: read_run(trained / "outputs" / name / "checkpoints" / "last.ckpt") for name in ("masked", "unmasked")}


def run(folder, *arguments):
    return call(main, *arguments, cwd=folder, strict=True)


def test_a_shortened_validation_is_named(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "copy")
    for path in (tmp_path / "copy" / "outputs").glob("*/config.yaml"):
        settings = yaml.safe_load(path.read_text())
        settings["trainer"]["limit_val_batches"] = 1
        path.write_text(yaml.safe_dump(settings))
    result = run(tmp_path / "copy", "masked=outputs/masked", "unmasked=outputs/unmasked", *OPTIONS)
    assert result.returncode == 0, result.stderr
    remark = "The validation losses that the runs logged are those with trainer.limit_val_batches=1."
    assert remark in result.stdout
    assert remark in (tmp_path / "copy" / "outputs" / "unmasked" / "control" / "control.md").read_text()


def direct(model, window):
    """Mean losses (one-pass, prefix-only) of the targets of one window (T + 1,), one prefix at a time, in nats."""
    ids, targets = window[:-1], window[1:]
    with torch.no_grad():
        one_pass = model(ids[None])[0].double().log_softmax(-1)
        prefixes = torch.stack([model(ids[None, : t + 1])[0, -1].double().log_softmax(-1) for t in range(T)])
    return [-log_p[torch.arange(T), targets].mean().item() for log_p in (one_pass, prefixes)]


def test_the_experiment_differs_from_the_default_in_the_mask_only():
    control, default = (
        compose("train", Typed.of(settings)).settings for settings in (["experiment=control_no_mask"], [])
    )
    assert (control["model"].pop("causal"), default["model"].pop("causal")) == (False, True)
    assert (control["causality"].pop("allow_leak"), default["causality"].pop("allow_leak")) == (True, False)
    assert control == default


def test_the_control_end_to_end(trained):
    best = trained / "outputs" / "unmasked" / "checkpoints" / "best.ckpt"
    best.unlink()  # a link to last.ckpt
    best.write_bytes(b"")  # must not be read
    before = set(trained.rglob("*"))
    result = run(trained, "masked=outputs/masked", "unmasked=outputs/unmasked", *OPTIONS)
    assert result.returncode == 0, result.stderr
    out = trained / "outputs" / "unmasked" / "control"
    assert set(trained.rglob("*")) - before == {out, *(out / f"control.{kind}" for kind in ("json", "md", "png"))}
    assert (out / "control.png").read_bytes().startswith(b"\x89PNG")

    report = json.loads((out / "control.json").read_text())
    [val] = validation_tokens(read_run(trained / "outputs/masked/checkpoints/last.ckpt"))
    val = torch.tensor(val.astype(int))
    counts = json.loads(next((trained / "cache").glob("*/meta.json")).read_text())["counts"]["val"]
    text = load(trained / "outputs" / "masked" / "checkpoints" / "last.ckpt").tokenizer.decode(val.tolist())
    assert text == (trained / "text.txt").read_text()[-counts["characters"] :]
    last = (len(val) - 1) // T - 1
    assert report["windows"]["numbers"] == [0, last // 3, 2 * last // 3, last] and report["windows"]["length"] == T
    assert (report["seed"], report["steps"], report["uniform_guess"]) == (0, 40, math.log(300))
    prefix_only = {}
    for name in ("masked", "unmasked"):
        side, lm = report[name], load(trained / "outputs" / name / "checkpoints" / "last.ckpt")
        windows = [val[n * T : n * T + T + 1] for n in report["windows"]["numbers"]]
        losses = torch.tensor([direct(lm.model, window) for window in windows]).double()  # (windows, 2)
        prefix_only[name] = losses[:, 1]
        for key, loss in (
            ("one_pass", losses[:, 0]),
            ("prefix_only", losses[:, 1]),
            ("gap", losses[:, 1] - losses[:, 0]),
        ):
            # The text is one document, so each of the four windows is an observation.
            half = scipy.stats.t.ppf(0.975, 3) * loss.std().item() / 2
            found, expected = side[key], [loss.mean().item(), loss.mean().item() - half, loss.mean().item() + half]
            assert [found["mean"], found["low"], found["high"]] == pytest.approx(expected, abs=2e-5)
        assert side["checkpoint"] == f"outputs/{name}/checkpoints/last.ckpt"
        assert side["parameters"] == lm.model.n_parameters()
        logged = [
            (int(row["step"]), float(row["train/loss"]))
            for row in rows(trained / "outputs" / name)
            if row["train/loss"]
        ]
        assert side["curves"]["train"] == [list(point) for point in logged]
        texts = lm.generate(["line 3", ""], max_new_tokens=9, temperature=0.8, seed=0)
        assert side["samples"] == [["line 3", texts[0]], ["", texts[1]]]
    difference = prefix_only["unmasked"] - prefix_only["masked"]
    found, half = report["prefix_only_unmasked_minus_masked"], scipy.stats.t.ppf(0.975, 3) * difference.std().item() / 2
    assert found["mean"] == pytest.approx(difference.mean().item(), abs=1e-5)
    assert (found["high"] - found["low"]) / 2 == pytest.approx(half, abs=2e-5)
    assert report["observations"] == {
        **{"unit": "blocks of windows", "documents": 1, "clusters": 4, "effective_clusters": 4, "df": pytest.approx(3)},
        "described": "4 blocks of windows (only 1 of 10 documents needed), worth 4.0 of equal size, "
        "3.0 degrees of freedom",
    }
    assert abs(report["masked"]["gap"]["mean"]) < 1e-5 < 0.01 < report["unmasked"]["gap"]["mean"]

    page = (out / "control.md").read_text(encoding="utf-8")
    shown = result.stdout.split("\n\n")[0]
    assert f"± is half of the 95 % interval over {report['observations']['described']}." in result.stdout
    assert shown in page and f"{report['unmasked']['prefix_only']['mean']:.4f} ±" in shown
    bits = (
        report["masked"]["prefix_only"]["mean"]
        * (counts["tokens"] - 1)
        / math.log(2)
        / (counts["bytes"] - counts["first_bytes"])
    )
    assert f"{bits:.4f} |" in shown.splitlines()[-1]


def test_the_losses_are_clustered_by_document():
    models = {"masked": SimpleNamespace(model=tiny_gpt()), "unmasked": SimpleNamespace(model=tiny_gpt(causal=False))}
    ids, targets = torch.randint(31, (2, 9, 12))
    documents = torch.arange(108).view(9, 12) // 10  # 11 documents, nearly all of them in two windows
    windows = (np.arange(9), TokenWindows(ids, targets), TextClusters.of(documents, targets))
    sides = {"masked": {}, "unmasked": {}}
    found, nll = {"difference": measure(models, windows, sides)}, {}
    for name, lm in models.items():
        columns = [lm.model(ids[:, : t + 1])[:, -1].double().log_softmax(-1) for t in range(12)]  # 12 of (9, V)
        nll[name] = -torch.stack(columns, 1).gather(-1, targets[..., None])[..., 0].detach()
        found[name] = sides[name]["prefix_only"]
    nll["difference"] = nll["unmasked"] - nll["masked"]
    for name, values in nll.items():
        sums = [values[documents == document].sum().item() for document in range(11)]
        expected = clustered_mean(sums, [10] * 10 + [8]).interval()
        assert (found[name].mean, found[name].half_width) == pytest.approx(
            (expected.mean, expected.half_width), rel=1e-4
        )


def test_a_missing_run_is_one_line_with_status_2(trained, tmp_path):
    assert_refused(
        run(tmp_path), "masked is missing; give the folder of a run of `python train.py`: masked=outputs/DATE/TIME"
    )
    assert_refused(
        run(trained, "masked=outputs/masked"),
        "unmasked is missing; give the folder of a run of `python train.py experiment=control_no_",
    )
    assert_refused(run(trained, "masked=outputs/masked", "unmasked=nowhere"), "nowhere does not exist")
    assert not list(tmp_path.iterdir())


def test_other_data_are_refused_and_nothing_is_left(trained, tmp_path):
    shutil.copytree(trained / "outputs" / "unmasked", tmp_path / "other")
    checkpoint = tmp_path / "other" / "checkpoints" / "last.ckpt"
    rewrite(checkpoint, lambda content: content["tril"]["data"].update(fingerprint="0123456789abcdef"))
    before = set(tmp_path.rglob("*"))
    result = run(tmp_path, f"masked={trained / 'outputs' / 'masked'}", "unmasked=other", *OPTIONS, "out=made/here")
    assert_refused(result, "and 0123456789ab); train both on the same text")
    assert set(tmp_path.rglob("*")) == before


def change(run, **settings):
    """The run with other settings, by dotted names."""
    changed = json.loads(json.dumps(run.settings))
    for name, value in settings.items():
        *path, key = name.split("__")
        group = changed
        for part in path:
            group = group[part]
        group[key] = value
    return replace(run, settings=changed)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("masked", {"seed": 1}, r"differ in more than the mask \(seed=1 and 0\); train both with the same settings"),
        ("unmasked", {"model__dim": 64}, r"\(model.dim=32 and 64\)"),
        ("unmasked", {"optim__schedule__kind": "cosine"}, r"\(optim.schedule.kind=\w+ and cosine\)"),
        (
            "unmasked",
            {"trainer__max_steps": 900, "data__batch_size": 8},
            r"\(data.batch_size=4 and 8, trainer.max_steps=40 and 900\)",
        ),
    ],
)
def test_runs_that_differ_in_more_than_the_mask_are_refused(runs, name, settings, message):
    check_pair(runs)
    with pytest.raises(ValueError, match=message):
        check_pair(runs | {name: change(runs[name], **settings)})


def test_other_refusals_of_a_pair(runs):
    with pytest.raises(ValueError, match=r"masked=.* has model.causal=False; give a run of `python train.py`"):
        check_pair({"masked": runs["unmasked"], "unmasked": runs["masked"]})
    with pytest.raises(ValueError, match=r"unmasked=.* has model.causal=True; give a run of .*control_no_mask"):
        check_pair({"masked": runs["masked"], "unmasked": runs["masked"]})
    with pytest.raises(ValueError, match="steps done=40 and 20"):
        check_pair(runs | {"unmasked": replace(runs["unmasked"], steps=20)})
    with pytest.raises(ValueError, match="other data or tokenizers"):
        check_pair(
            runs | {"unmasked": replace(runs["unmasked"], metadata=runs["unmasked"].metadata | {"tokenizer": "{}"})}
        )
    with pytest.raises(ValueError, match="data.document_mask=true"):
        check_pair({name: change(run, data__document_mask=True) for name, run in runs.items()})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("windows", 1, "windows=1 must be greater than or equal to 2"),
        ("windows", 2.5, "windows=2.5 must be a valid integer"),
        ("prompts", [], r"prompts=\[\] .*at least 1 item"),
        ("prompts", "def ", "prompts='def ' must be a valid list"),
        ("prompts", [1], "prompts.0=1 must be a valid string"),
    ],
)
def test_wrong_settings(key, value, message):
    settings = compose("control", Typed()).settings
    build(ControlConfig, settings)
    with pytest.raises(ValueError) as caught:
        build(ControlConfig, settings | {key: value})
    assert re.match(message, message_of(caught.value))


def test_the_table():
    assert table(two_sides(), bytes_per_token=3.0) == TABLE
    assert 3.0 / math.log(2) / 3.0 == pytest.approx(1.4427, abs=5e-5)
