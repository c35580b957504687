"""When a fit may be called a law, and that every statement of scaling.md can appear."""

import re
from pathlib import Path

import pytest
from jinja2 import Environment, nodes

from tests.scripts.ablation.law_sweeps import LAWS, law_sweep, noisy, points_from
from tril.scripts.ablation import templates
from tril.scripts.ablation.goodness_of_fit import FormTest, FormTests, MeanSquare, check_form
from tril.scripts.ablation.scaling_findings import findings, naive_rival, shortcomings
from tril.scripts.ablation.scaling_law import Law, fit
from tril.scripts.ablation.scaling_predictions import NAIVE, resample
from tril.scripts.ablation.templates import render

TEMPLATE = Path(templates.__file__).with_name("scaling.md.jinja")
SETTINGS = {
    "size": "parameters_without_embeddings",
    "predict": {"parameters": [1e8], "tokens": [2.0], "flops": [10.0]},
    "resamples": 40,
    "seed": 0,
}
TRUE = LAWS[3]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The results of a sweep of a law with noise and two seeds."""
    points = noisy(points_from(TRUE), 0.003, seed=1, seeds=2)
    sweep = law_sweep(tmp_path_factory.mktemp("law"), points)
    law = fit(points, restarts=2)
    form = check_form(points, law)
    return findings(SETTINGS, sweep, points, law, form, resample(points, law, form.noise, 3, seed=0))


def changed(found: dict, **values) -> dict:
    """A copy with other entries; `form__df=1` is an entry below "form"."""
    copy = dict(found)
    for name, value in values.items():
        key, _, entry = name.partition("__")
        copy[key] = copy[key] | {entry: value} if entry else value
    return copy


# ---------------------------------------------------------------- law or illustration


def errors(fitted: float | None, naive: float | None) -> dict:
    methods = dict(zip(("fit", *NAIVE), (fitted, naive, 9.0, 9.0), strict=True))
    return {name: None if value is None else {"mean": value} for name, value in methods.items()}


GOOD, BAD = errors(0.8, 1.0), errors(0.95, 1.0)
ALL_GOOD = {
    "one point": BAD,
    "largest size": GOOD,
    "longest runs": GOOD,
}  # one point between others is no extrapolation


def form_of(interaction=1.0, lack_of_fit=1.0) -> FormTests:
    tests = FormTest(1.0, (19,), interaction), FormTest(1.0, (15, 19), lack_of_fit)
    return FormTests(0.0, 0.0, None, *tests, MeanSquare(1.0, 15), MeanSquare(1.0, 19), 0.0)


@pytest.mark.parametrize(
    "points, law, form, measured, expected",
    [
        ({"seeds": 2}, TRUE, form_of(), ALL_GOOD, []),
        ({"seeds": 1}, TRUE, form_of(), ALL_GOOD, ["the sweep has 1 of at least 2 seeds at every point"]),
        (
            {"seeds": 1, "tokens": (1e5, 2e5, 4e5, 8e5)},
            TRUE,
            form_of(),
            ALL_GOOD,
            ["the sweep has 4 of at least 5 token counts and 1 of at least 2 seeds at every point"],
        ),
        ({"seeds": 2}, Law(1, 1, 1, 1, 1, ("E", "B")), form_of(), ALL_GOOD, ["E, B ended at a bound of the fit"]),
        (
            {"seeds": 2},
            TRUE,
            form_of(0.0012, 0.049),
            ALL_GOOD,
            [
                "its residuals follow ln N x ln D (p = 0.0012)",
                "it misses the points by more than the seeds differ (p = 0.049)",
            ],
        ),
        ({"seeds": 2}, TRUE, form_of(0.051, 0.051), ALL_GOOD, []),
        (
            {"seeds": 2},
            TRUE,
            form_of(),
            ALL_GOOD | {"longest runs": BAD},
            ["for the longest runs it is no better than the log-linear step"],
        ),
        (
            {"seeds": 2},
            TRUE,
            form_of(),
            ALL_GOOD | {"largest size": BAD},
            ["for the largest size it is no better than the log-linear step"],
        ),
    ],
)
def test_shortcomings(points, law, form, measured, expected):
    options = {"tokens": points["tokens"]} if "tokens" in points else {}
    drawn = noisy(points_from(TRUE, **options), 0.003, seed=0, seeds=points["seeds"])
    assert shortcomings(drawn, law, form, measured) == expected


@pytest.mark.parametrize(
    "measured, rival",
    [
        (errors(0.9, 1.0), ""),  # a tenth smaller
        (errors(0.91, 1.0), "log-linear step"),
        (errors(9.5, 10.0), "nearest point"),  # the best of the three
        (errors(None, 1.0), ""),
        (errors(9.5, None), "nearest point"),
    ],
)
def test_a_fit_is_better_if_its_error_is_a_tenth_smaller(measured, rival):
    assert naive_rival(measured) == rival


def test_a_simulated_law_is_called_a_law(found):
    assert found["shortcomings"] == []
    assert "**A law within its points**: no test rejects its form" in render("scaling.md.jinja", **found)


# ---------------------------------------------------------------- statements


def variants(found: dict) -> list[dict]:
    """Results in which, together, every condition of the template is true once and false once."""
    interaction, lack_of_fit = found["form"]["interaction"], found["form"]["lack_of_fit"]
    no_interval = {name: estimate | {"low": None, "high": None} for name, estimate in found["law"].items()}
    rejected = {"interaction": interaction | {"p": 0.01}, "lack_of_fit": lack_of_fit | {"p": 0.01}, "rejected": True}
    nothing = dict.fromkeys(("fit", *NAIVE))
    methods = found["errors"]["longest runs"]
    [prediction], [split] = found["predictions"], found["optima"]
    none = {"value": 1.0, "low": None, "high": None}
    return [
        found,
        changed(
            found,
            shortcomings=["a", "b"],
            law=no_interval,
            form=found["form"] | rejected | {"extra_gain": 0.1},
            rivals=found["rivals"] | {"longest runs": "nearest point"},
            predictions=[prediction | {"loss": none}],
            optima=[split | {"parameters": none, "loss": none, "tokens_per_parameter": none}],
        ),
        changed(found, form=found["form"] | rejected | {"extra_gain": -0.1}),
        changed(found, form__extra_gain=0.1, form__extra_gain_error=None),
        changed(found, form__extra_gain=-0.1, form__extra_gain_error=0.2),
        changed(found, form__interaction=None, form__lack_of_fit=None, form__pure_error=None),
        changed(found, bounds=["E", "A"], resamples_at_bounds=0.25, unfinished=["x (failed)"], diverged=["y"]),
        changed(
            found,
            points=[row | {"seeds": 1, "one point": float("nan")} for row in found["points"]],
            errors=found["errors"] | {"largest size": nothing, "longest runs": methods | {"fit": None}},
            predictions=[prediction | {"naive": prediction["naive"] | {"log-linear step": float("nan")}}],
            other_sizes={"parameters": found["other_sizes"]["parameters"] | {"interaction": None}},
        ),
        found | {"published": True, "commands": ["python train.py -m a=1"]},
    ]


def statements() -> list[str]:
    """Every text of the template between two marks of Jinja or two cells, and every text that a condition chooses."""
    tree = Environment().parse(TEMPLATE.read_text(encoding="utf-8"))
    texts = [node.data for node in tree.find_all(nodes.TemplateData)]
    for choice in tree.find_all(nodes.CondExpr):
        texts += [branch.value for branch in (choice.expr1, choice.expr2) if isinstance(branch, nodes.Const)]
    parts = [part.strip() for text in texts for part in re.split(r"[|\n]", text)]
    return sorted({part for part in parts if re.search(r"\w", part)})


def test_every_statement_is_reachable_and_none_is_always_there(found):
    pages = [render("scaling.md.jinja", **variant) for variant in variants(found)]
    missing = [text for text in statements() if not any(text in page for page in pages)]
    assert missing == []
    assert len(statements()) > 60 and len(set(pages)) == len(pages)


@pytest.mark.parametrize(
    "which, sentence",
    [
        (0, r"\| interaction of ln N and ln D \| +t = -?\d+\.\d\d \| +19 \|"),
        (0, r"\| lack of fit +\| +F = \d+\.\d\d \| +15 and 19 \|"),
        (
            0,
            r"- No interaction was found\. .* give or take 0\.\d{3}: an interaction within that range remains possible",
        ),
        (0, r"- The points miss the fit by 0\.\d\d % of the loss of one run, seeds differ by 0\.\d\d %: chance can"),
        (0, r"Intervals are the middle 95 % of the fits to 40 resamples: .* larger of the scatter around the fit and"),
        (0, r"together they reject a right one in 5% of sweeps"),
        (0, r"- The largest size, from smaller ones alone: the fit errs less than every naive baseline"),
        (1, r"\*\*An illustration, not a law\*\*: a; b\.\n"),
        (1, r"gains 0\.100 nats per token more than the sum .* N and D together, the fit is too high if"),
        (1, r"- \*\*The longest runs, from shorter ones alone: the fit is no better than the nearest point\.\*\*"),
        (1, r"- No intervals are given: they would assume that the form is right\."),
        (1, r"\| 100 M \|[^|]*\| 1\.000 \| +none \|"),
        (2, r"gains 0\.100 nats per token less than the sum .* N and D together, the fit is too low if"),
        (3, r"compared with the smallest size: an interaction within that range"),
        (5, r"With one seed per point, nothing shows how much of the residuals is chance"),
        (0, r"hold for these seeds: what a seed changes .* alike, here by up to 0\.\d\d %, is not in them\."),
        (5, r"and is the scatter around the fit\. They assume that .* beyond the points\.\n"),
        (6, r"- \*\*The fit is degenerate\*\*: E, A ended at a bound"),
        (6, r"- 25% of the resamples have a parameter at a bound\."),
        (6, r"- Left out: x \(failed\); y\."),
        (7, r"the longest runs, from shorter ones alone \| +fit \| +0 \| too few remain"),
        (7, r"There is one seed per point"),
    ],
)
def test_statement(found, which, sentence):
    assert re.search(sentence, render("scaling.md.jinja", **variants(found)[which]))


def test_intervals_are_not_mentioned_without_any(found):
    page = render("scaling.md.jinja", **variants(found)[1])
    assert "Intervals are the middle" not in page and "with an interval from" not in page


def test_tables_are_separated_from_the_text(found):
    """A line that follows a table without an empty line would be a row of it."""
    for page in (render("scaling.md.jinja", **variant) for variant in variants(found)):
        assert not re.search(r"^\|.*\|\n[^|\n]", page, re.MULTILINE)
        for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
            assert len({line.count("|") for line in table.splitlines()}) == 1, table
