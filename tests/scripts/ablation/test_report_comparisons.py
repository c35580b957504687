"""The comparisons of a report: the tables, the sentence at the top, what is said about the test and its stages."""

import json
import math
import statistics
from dataclasses import replace

import pytest

from tests.scripts.ablation.synthetic import BYTES_PER_TOKEN, FOUR, HEADS, ONE, SEEDS, sweep_of
from tests.scripts.ablation.tuned import tune
from tril.model.intervals import Interval
from tril.scripts.ablation.comparisons import compare_with_baseline
from tril.scripts.ablation.report import answer, write_up
from tril.scripts.ablation.report_tables import compared, details, read_configs
from tril.scripts.ablation.results import read_sweep
from tril.scripts.ablation.statistics import EQUAL, POOLED, SEPARATE, Comparison
from tril.scripts.ablation.templates import render

FOUND = Comparison(
    Interval(0.0247, 0.0082, 0.0412, 4),
    p=0.0151,
    verdict="worse",
    more_seeds=None,
    remark="",
    method=POOLED,
    df=9.0,
    detectable=0.02345,
    alpha=0.04,
    n_clusters=89,
    effective_clusters=31.27,
    clusters="documents",
)


def page(sweep, comparisons, **options):
    """The paragraphs of report.md without its escapes."""
    content = write_up(sweep, "final", comparisons=comparisons, configs=read_configs(sweep), pictures=[], **options)
    return render("report.md.jinja", **content).replace("\\", "").split("\n\n")


def note(text, start):
    [found] = [paragraph for paragraph in text if paragraph.startswith(start)]
    return found


def quantile(p):
    """Of Student's t with 2 degrees of freedom, in closed form."""
    return (2 * p - 1) / math.sqrt(2 * p * (1 - p))


def shown(differences):
    """Mean ± half of its interval at level 0.04, by the textbook. The losses are the same in the whole text."""
    half = quantile(1 - 0.04 / 2) * statistics.stdev(differences) / math.sqrt(len(differences))
    return f"{statistics.fmean(differences):.4f} ± {half:.4f}"


def test_one_comparison_is_the_paired_t_test(tmp_path):
    sweep = sweep_of(tmp_path)
    found = compare_with_baseline(sweep, "final")
    differences = [one - four for one, four in zip(ONE, FOUR, strict=True)]
    t = statistics.fmean(differences) / (statistics.stdev(differences) / math.sqrt(3))
    p = 1 - t / math.sqrt(2 + t * t)
    assert compared(found).rows[0][:6] == [
        *("n_heads=1", "not distinguishable", f"+{shown(differences)}", "nats per token", f"{p:.2g}", "3")
    ]
    assert "## Compared with n_heads=4: final validation loss" in page(sweep, found)


def test_answer_has_the_unit_of_the_comparison(tmp_path):
    higher = {seed: value + 3 + 0.01 * seed for seed, value in zip(SEEDS, FOUR, strict=True)}
    sweep = sweep_of(tmp_path, HEADS | {(1,): higher}, summary={(1,): {"data_fingerprint": "other"}})
    bits = [(3 + 0.01 * seed) / math.log(2) / BYTES_PER_TOKEN for seed in SEEDS]
    said = answer(sweep, "final", compare_with_baseline(sweep))
    assert said == f"Against n_heads=4, over 3 seeds: n_heads=1 is worse by {shown(bits)} bits per byte."


def test_answer_names_every_verdict(tmp_path):
    sweep = sweep_of(tmp_path)
    found = {
        "a": FOUND,
        "b=1, c": replace(FOUND, difference=Interval(-0.3, -0.4, -0.2, 3), verdict="better"),
        "d": replace(FOUND, verdict="not distinguishable"),
        "e": replace(FOUND, verdict="not distinguishable"),
        "f": replace(FOUND, verdict=EQUAL, margin=0.005),
        "g": replace(FOUND, verdict="preliminary"),
    }
    assert answer(sweep, "final", found) == (
        "Against n_heads=4, over 3 to 4 seeds: (b=1, c) is better by 0.3000 ± 0.1000 nats per token; "
        "a is worse by 0.0247 ± 0.0165 nats per token; f is equal to it within 0.005 nats per token; "
        "d, e are not distinguishable from it; g is not compared yet, because its stage has unfinished runs."
    )


def test_what_the_tests_rest_on(tmp_path):
    others = {"b": replace(FOUND, method=SEPARATE, df=2.94, stage=2, alpha=0.005, detectable=None), "c": FOUND}
    whole = replace(FOUND, n_clusters=0, effective_clusters=1.0, clusters="")
    table = details({"a": FOUND, **others, "d": whole, "e": replace(FOUND, method="")})
    assert table.rows == [
        ["a", "pooled variance, Dunnett", "9", "89 documents", "31.3", "1", "0.04", "0.023"],
        ["b", "separate variances, Bonferroni", "2.94", "89 documents", "31.3", "2", "0.005", "-"],
        ["c", "pooled variance, Dunnett", "9", "89 documents", "31.3", "1", "0.04", "0.023"],
        ["d", "pooled variance, Dunnett", "9", "the whole text", "-", "1", "0.04", "0.023"],
    ]
    table = details({"a": replace(FOUND, margin=0.01, p_equal=0.0123)})
    assert (table.header[-1], table.rows[0][-1]) == ("p, equal within the margin", "0.012")
    assert table.rows[0][1] == "pooled variance"  # one comparison is not corrected
    assert "p" in compared({"a": FOUND}).header and "p, corrected" in compared({"a": FOUND, "b": FOUND}).header


METHODS = [
    (POOLED, "Pooled variance: ", "Dunnett's distribution accounts for 3 comparisons with the same baseline."),
    (
        SEPARATE,
        "Separate variances: ",
        "Bonferroni's correction accounts for 3 comparisons: each p is multiplied by 3.",
    ),
]


@pytest.mark.parametrize("method, start, correction", METHODS)
def test_method_is_explained(tmp_path, method, start, correction):
    """The levels are those of `stages`: 0.04 + 0.005 + 0.0025 + ... <= 0.05."""
    found = {f"v{i}": replace(FOUND, method=method, stage=2, alpha=0.005) for i in range(3)}
    sweep = sweep_of(tmp_path)
    text = page(sweep, found)
    assert note(text, correction) and note(text, start)
    alone = page(sweep, {"v0": found["v0"]})
    assert note(alone, start) and not any("Dunnett" in one or "Bonferroni" in one or "correct" in one for one in alone)
    assert sum(one.startswith(("Pooled variance: ", "Separate variances: ")) for one in text) == 1
    level = note(text, "Every launch that adds seeds is another look")
    assert "This is stage 2, tested at 0.5 %: if no variant differed from the baseline, at most 0.5 of 100" in level
    assert level.endswith("The levels of all stages together are at most 5 %, however it is decided to add seeds.")
    assert "probability of 80 %" in note(text, "Not distinguishable does not mean equal")
    assert not any(one.startswith(("Equal within the margin", "Preliminary: ")) for one in text)


def test_margin_and_preliminary_stage_are_explained(tmp_path):
    found = {"a": replace(FOUND, verdict=EQUAL, margin=0.005), "b": replace(FOUND, verdict="preliminary", margin=0.005)}
    text = page(sweep_of(tmp_path), found)
    assert "less than 0.005 nats per token in both directions" in note(text, "Equal within the margin")
    assert note(text, "Preliminary: ")


def test_margin_is_passed_on(tmp_path):
    sweep = sweep_of(tmp_path)
    assert compare_with_baseline(sweep, margin=50.0)["n_heads=1"].verdict == EQUAL
    assert compare_with_baseline(sweep, margin=None)["n_heads=1"].verdict == "not distinguishable"


def index(sweep, **changes):
    path = sweep.folder / "sweep.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return read_sweep(sweep.folder)


def test_commands_of_the_stages(tmp_path):
    sweep = sweep_of(tmp_path, HEADS | {(4,): HEADS[4,] | {3: "unfinished", 4: 3.0}})
    assert not any(paragraph.startswith("Stage") for paragraph in page(sweep, {}))
    sweep = index(sweep, command="python train.py -m seed=0,1,2")
    text = page(sweep, {})
    assert text[text.index("Command:") + 1] == "```\npython train.py -m seed=0,1,2\n```"
    stages = [
        {"seeds": [0, 1, 2], "date": None, "command": None},
        {"seeds": [3, 4], "date": "2026-11-22T10:00:00+00:00", "command": "python train.py -m `seed=3,4`"},
    ]
    text = page(index(sweep, stages=stages), {})
    start = text.index("Stage 1 (seed 0, 1, 2):")
    assert text[start + 1 : start + 4] == [
        "```\ncommand not recorded\n```",
        "Stage 2 (seed 3, 4; 2026-11-22T10:00:00+00:00; preliminary: 1 run not finished):",
        "```\npython train.py -m `seed=3,4`\n```",
    ]


def test_tuning_is_explained_where_it_was(tmp_path):
    sweep = sweep_of(tmp_path)
    assert "## Tuning of the learning rates" not in page(sweep, {})
    text = page(read_sweep(tune(sweep.folder)), {})
    start = text.index("## Tuning of the learning rates")
    assert text[start + 1].startswith("Each variant has its own multiplier of the learning rates")
    assert "3.1000 (chosen, an end of the range)" in text[start + 2] and "trials / runs, FLOPs" in text[start + 4]


def test_archive_is_named_only_where_it_is(tmp_path):
    sweep = sweep_of(tmp_path)
    assert "```\npython scripts/report.py dir=runs.tar.xz out=NEW\n```" in page(sweep, {}, published=True)
    assert not any("runs.tar.xz" in paragraph for paragraph in page(sweep, {}))


def test_two_seeds_are_said_to_be_few(tmp_path):
    quantile_of_one_degree = math.tan(math.pi * (0.975 - 0.5))  # Student's t with 1 degree of freedom is Cauchy's
    two = sweep_of(tmp_path / "two", {(1,): {0: 3.0, 1: 3.1}, (4,): {0: 3.0, 1: 3.1, 2: 3.2}})
    assert f"{quantile_of_one_degree:.1f} standard errors to each side" in note(page(two, {}), "Two seeds: ")
    assert not any(paragraph.startswith("Two seeds") for paragraph in page(sweep_of(tmp_path), {}))
