"""The referee: a sweep of two variants that adds pairs of runs until the difference between them is known.

Its interval holds at every look (`Bound.EVERY_LOOK`), so any rule for adding pairs is allowed. Its folder, runs,
continuation and report are those of a sweep of the keys in which the two configurations differ.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tril.model.atomic_files import write_json
from tril.model.comparison import BETTER, DIVERGED, EQUAL, LOOKS_ALPHA, MAX_PAIRS, MIN_PAIRS, WORSE, Comparison
from tril.model.formats import clock, plural
from tril.model.runs import FAILURE, ROOTS, SWEEP, new_folder, state_of
from tril.model.training.stop import StoppedError, stop_on_signals
from tril.scripts.cli.app import compose, key_of
from tril.scripts.cli.config import RunConfig
from tril.scripts.cli.errors import UserError, check_writable, message_of, user_errors
from tril.scripts.experiments import grid, run_process
from tril.scripts.experiments.launch import known_sweep, with_launch
from tril.scripts.experiments.losses import compare_sweep, different_texts, losses_of
from tril.scripts.experiments.sweep import Sweep, read_json, read_sweep

ARMS = ("baseline", "candidate")
CERTIFIED = "the referee compares certified runs only"
NOT_OF_AN_ARM = {  # keys that the referee chooses
    "seed": "set the first seed with seed=N, outside of the arms",
    "resume": "the referee continues its runs by itself",
    "minutes": "steps would depend on the machine; set trainer.max_steps",
    "ablation": "name one configuration",
    "sweep": "the referee trains no grid; tune in a sweep, then set the value",
    "hydra": "the referee chooses the folders; set its own with out=FOLDER",
}


@dataclass(frozen=True)
class Rules:
    """When to stop.

    Attributes:
        margin: nats per token, differences below it count as equal.
        seconds: that all pairs may take.
        pairs: that may be trained.
        seed: of the first pair.
    """

    margin: float
    seconds: float
    pairs: int = MAX_PAIRS
    seed: int = 0


@dataclass(frozen=True)
class Decision:
    """The state after some pairs.

    Attributes:
        verdict: "better", "worse", "equal" or "undecided"; None: train another pair.
        reason: why there is this verdict, a sentence; may be empty.
        look: the comparison of candidate and baseline.
        unit: of its losses.
        seconds: of all pairs.
    """

    verdict: str | None
    reason: str
    look: Comparison
    unit: str
    seconds: float

    def __str__(self) -> str:
        """The result in one line."""
        difference, ends = self.look.difference, "no interval yet"
        if difference.low is not None:
            ends = f"{1 - LOOKS_ALPHA:.0%} interval {difference.low:+z.4f} to {difference.high:+z.4f}"
        after = f"after {plural(self.look.seeds, 'pair')} of runs in {clock(self.seconds)}"
        line = (
            f"{self.verdict or 'open'}: candidate - baseline = {difference.mean:+z.4f} {self.unit} ({ends}), {after}."
        )
        return f"{line} {self.reason}".strip()


def plan_arms(texts: Sequence[str], common: str, seed: int) -> list[grid.PlannedRun]:
    """Composes and checks the first run of the baseline and of the candidate.

    Args:
        texts: the settings of each, separated by spaces.
        common: settings of both, which those of an arm replace.

    Raises:
        ValueError: settings that are not valid, or no difference.
    """
    runs, choices = [], []
    for name, text in zip(ARMS, texts, strict=True):
        try:
            words = [*split_overrides(common, text), f"seed={seed}"]
            line = compose("train", words)
            config = RunConfig.of(line.settings, line.given).on_this_machine()
        except (ValueError, OSError) as error:
            raise ValueError(f"{name}: {message_of(error)}") from error
        if config.causality.allow_leak:
            raise ValueError(f"{name}: causality.allow_leak=true allows false losses; {CERTIFIED}")
        if config.callbacks.causality is None:
            raise ValueError(f"{name}: callbacks.causality=null leaves out the certificate; {CERTIFIED}")
        runs.append(grid.PlannedRun(words, line.settings, config))
        choices.append(line.choices)
    if runs[0].identity == runs[1].identity:
        raise ValueError("baseline and candidate have the same settings; set what the candidate changes")
    for key in dict.fromkeys(key_of(each) for run in runs for each in run.overrides):
        values = [grid.value_of(run.settings, key, of_run.get(key)) for run, of_run in zip(runs, choices, strict=True)]
        if values[0] != values[1]:
            for run, value in zip(runs, values, strict=True):
                run.values[key] = value
    return runs


def split_overrides(common: str, text: str) -> list[str]:
    """The overrides of both arms and of this one, which replaces common values of the same key.

    Raises:
        ValueError: a text without "=", or a key that is not of an arm.
    """
    by_key: dict[str, str] = {}
    for words in (common, text):
        try:
            overrides = shlex.split(words)
        except ValueError as error:
            raise ValueError(f"cannot read {words!r} ({error}); close the quotes") from error
        for override in overrides:
            key = override.partition("=")[0].lstrip("+~")
            if "=" not in override and not override.startswith("~"):
                raise ValueError(f"cannot read {override!r}; settings are written key=value")
            if remedy := NOT_OF_AN_ARM.get(key.partition(".")[0].partition("/")[0]):
                raise ValueError(f"{override} cannot be set for an arm; {remedy}")
            by_key[key] = override
    return list(by_key.values())


def judge(arms: Sequence[grid.PlannedRun], rules: Rules, out: str | None) -> tuple[Decision, Path]:
    """Trains pairs of runs, of which finished ones stay, until there is a verdict.

    The arm that goes first alternates, so that a machine that becomes slower does so for both.

    Args:
        arms: of `plan_arms`.
        out: the folder of the sweep; None: that of the same comparison below multirun/, or a new one.

    Returns:
        The decision, and the folder with its report.

    Raises:
        UserError: the budget is too small for a verdict, or a run failed.
    """
    from tril.scripts.experiments.report import read_report

    swept = list(arms[0].values)
    with user_errors():
        if out is not None:
            check_writable(Path(out), "out")
        shared = compose("train", [word for word in arms[0].overrides if key_of(word) not in ("seed", *swept)]).settings
        folder, index = known_sweep(out, swept, shared, {"referee": {"seed": rules.seed}})
        if not index["runs"]:
            check_budget(arms, rules)
        folder = folder or new_folder(ROOTS[1])
        folder.mkdir(parents=True, exist_ok=True)
    index |= {"baseline": arms[0].values, "referee": {"seed": rules.seed, "margin": rules.margin}}
    print(f"folder  {folder}", flush=True)
    planned, pairs = [], 0
    try:
        with stop_on_signals():
            while True:
                runs = [with_seed(arm, rules.seed + pairs) for arm in arms]
                planned += [run.entry() for run in runs]
                write_json(folder / SWEEP, with_launch(index, planned, script="referee"))
                for i in (0, 1) if pairs % 2 == 0 else (1, 0):
                    train(folder, runs[i], ARMS[i])
                pairs += 1
                with user_errors():
                    decision = decide(folder, arms, pairs, rules)
                print(f"pair {pairs}  {decision}", flush=True)
                if decision.verdict is not None:
                    break
    except (StoppedError, SystemExit) as stopped:  # SystemExit: SIGTERM while a run trains
        status = 128 + stopped.signum if isinstance(stopped, StoppedError) else stopped.code
        done = f"stopped after {plural(pairs, 'pair')}; the same command continues ({folder})"
        print(done, file=sys.stderr, flush=True)
        sys.exit(status)
    read_report(folder).write(folder)
    return decision, folder


def with_seed(run: grid.PlannedRun, seed: int) -> grid.PlannedRun:
    """The run of the same variant with another seed."""
    overrides = [*(text for text in run.overrides if not text.startswith("seed=")), f"seed={seed}"]
    return replace(run, overrides=overrides, config=replace(run.config, top=replace(run.config.top, seed=seed)))


def check_budget(arms: Sequence[grid.PlannedRun], rules: Rules) -> None:
    """Raises ValueError if the budget is too small for a verdict, by a few timed steps of each arm."""
    estimated, rejected = grid.estimate_runs(arms)
    if rejected:
        name = ARMS[0] if len(rejected) == 2 or rejected[0].overrides == arms[0].overrides else ARMS[1]
        raise ValueError(f"{name}: {rejected[0].reason}")
    pair = sum(run.sizes["estimated_seconds"] for run in estimated)
    if MIN_PAIRS * pair > rules.seconds:
        needed = f"a pair of runs takes about {clock(pair)}, and a verdict needs at least {MIN_PAIRS} pairs"
        remedy = f"raise it to at least {MIN_PAIRS * pair:.0f}s"
        raise ValueError(f"budget={rules.seconds:g}s is too small: {needed}; {remedy}")


def train(sweep: Path, run: grid.PlannedRun, arm: str) -> None:
    """Trains one run unless it is finished.

    Raises:
        UserError: it failed, or was stopped.
    """
    folder, name = sweep / run.folder, f"{arm} seed={run.seed}"
    run_process.train(folder, run.overrides, name)
    if (state := state_of(folder)) == "failed":
        failure = read_json(folder / FAILURE)
        message = str(failure["message"]).removeprefix("error: ")
        raise UserError(f"{name} failed with status {failure['status']}: {message} ({folder / 'log.txt'})")
    if state != "finished":
        raise UserError(f"{name} was stopped by a signal; start the same command again to continue")


def decide(folder: Path, arms: Sequence[grid.PlannedRun], pairs: int, rules: Rules) -> Decision:
    """The decision after the first pairs in the folder of the sweep.

    Raises:
        ValueError: the arms have other validation texts.
    """
    sweep = read_sweep(folder)
    variants = [
        replace(variant, runs=tuple(run for run in variant.runs if run.seed < rules.seed + pairs))
        for arm in arms
        for variant in sweep.variants
        if variant.values == arm.values
    ]
    pair = Sweep(folder, sweep.keys, tuple(variants), variants[0], sweep.index)
    if sizes := different_texts(pair.runs):
        raise ValueError(f"the validation texts of the arms differ ({sizes}); give both the same text and split")
    losses = losses_of(pair)
    [look] = compare_sweep(losses, pair, rules.margin).values()
    seconds = sum(run.summary["seconds"] for run in pair.runs)
    return Decision(*conclude(look, seconds, rules), look, losses.unit, seconds)


def conclude(look: Comparison, seconds: float, rules: Rules) -> tuple[str | None, str]:
    """Verdict and reason after a look; (None, "") to continue."""
    if look.verdict == DIVERGED:  # the difference is not a number if both did
        verdict = "worse" if look.difference.mean > 0 else "undecided"
        return verdict, f"A loss of the {ARMS[verdict == 'worse']} is not finite."
    if look.verdict in (BETTER, WORSE, EQUAL):
        return look.verdict.split()[0], ""
    n, of_pair = look.seeds, seconds / look.seeds
    more = max(1, MIN_PAIRS - n)
    find = f" {plural(n, 'pair')} find a difference of {look.detectable:.2g}." if look.detectable else ""
    if n >= min(rules.pairs, MAX_PAIRS):
        valid = f"; the error rate holds for {MAX_PAIRS} pairs" if n >= MAX_PAIRS else ""
        return "undecided", f"{plural(n, 'pair')} of runs did not settle it{valid}.{find}"
    if seconds + more * of_pair > rules.seconds:
        left = "Another pair" if more == 1 else f"The {more} pairs that are still needed for a verdict"
        needed = f"{left}, about {clock(more * of_pair)}, would exceed the budget of {clock(rules.seconds)}"
        return "undecided", f"{needed}.{find}"
    return None, ""
