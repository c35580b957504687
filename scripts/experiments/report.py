"""The report of a sweep: report.md with its pictures, results.csv and runs.csv."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from tril.data.settings import printable
from tril.model.atomic_files import write_text
from tril.model.comparison import BETTER, DIVERGED, EQUAL, MAX_SEEDS, ONE_SEED, POWER, UNCLEAR, WORSE, Comparison
from tril.model.formats import markdown_table, plural, wrapped
from tril.model.intervals import Interval, spread
from tril.model.runs import partial_validation
from tril.scripts.experiments.losses import BITS, UNFINISHED, Losses, compare_sweep, launch_alpha, losses_of, tuned
from tril.scripts.experiments.plots import Picture, draw
from tril.scripts.experiments.sweep import LOSSES, Sweep, read_sweep, text_of

FIGURES = {  # of a run -> heading and format
    "parameters": ("parameters", ",.0f"),
    "flops_per_token": ("FLOPs per token", ",.0f"),
    "training_flops": ("training FLOPs", ".3e"),
    "tokens_per_second": ("tokens/s", ",.0f"),
    "peak_memory_gb": ("peak memory, GB", ".2f"),
    "seconds": ("wall time, s", ",.0f"),
}
CONDITIONS = {"code": "code version", "device": "device", "precision": "precision", "threads": "number of threads"}
SMALL = 0.01  # the table says how many seeds would find this difference
ANSWERS = {  # verdict -> how the answer begins, in the order in which it names them
    BETTER: "Better",
    WORSE: "Worse",
    EQUAL: "Equal within the margin",
    UNCLEAR: "Not distinguishable",
    UNFINISHED: "Not compared, because runs are missing",
    ONE_SEED: "Not compared, because fewer than two seeds are common to both",
    DIVERGED: "Not compared, because a loss is not a finite number",
}
STATUS = {BETTER: 0, WORSE: 1, EQUAL: 1}  # exit status for a candidate
UNDECIDED = 3


class Report:
    """What there is to say of a sweep.

    Args:
        losses: of the sweep.
        margin: nats per token, a difference below it counts as none; None: nothing is called equal.
    """

    def __init__(self, sweep: Sweep, losses: Losses, margin: float | None = None) -> None:
        self.sweep, self.losses, self.margin = sweep, losses, margin
        self.comparisons = compare_sweep(losses, sweep, margin)
        self.next_alpha = launch_alpha(len(sweep.launches) + 1)  # the level of a launch that adds seeds

    def write(self, folder: Path) -> list[str]:
        """Writes the report and its pictures, and returns the names of the files."""
        pictures = draw(self.sweep, self.losses, folder, self.comparisons)
        files = {
            "report.md": self.text(pictures),
            "results.csv": pd.DataFrame(self.result_rows()).to_csv(index=False),
            "runs.csv": pd.DataFrame(self.run_rows()).to_csv(index=False),
        }
        for name, content in files.items():
            write_text(folder / name, content)
        return [*files, *pictures]

    def shown(self) -> str:
        """What to print: the answer and the comparisons, or the losses of each variant."""
        parts = [self.compared_table(), self.basis()] if self.comparisons else [self.variant_table()]
        parts = [printable(self.answer()), *(parts if self.sweep.baseline.finished else ())]
        return wrapped("\n\n".join(parts))

    def status(self, candidate: str) -> int:
        """The exit status of a command that judges a variant: 0 better, 1 worse or equal, 3 undecided.

        Raises:
            ValueError: the candidate is no variant, or the baseline.
        """
        if (variant := self.sweep.find("candidate", candidate)) is self.sweep.baseline:
            raise ValueError(f"candidate={candidate} is the baseline; name another variant, or another baseline")
        each = self.comparisons.get(variant.label)
        if each is not None and math.isinf(each.difference.mean):  # one of both diverged
            return STATUS[WORSE if each.difference.mean > 0 else BETTER]
        return UNDECIDED if each is None else STATUS.get(each.verdict, UNDECIDED)

    def text(self, pictures: Mapping[str, Picture]) -> str:
        """The content of report.md, from its template."""
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        loader = FileSystemLoader(Path(__file__).parent)
        environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        environment.filters |= {"text": escape, "code": printable}
        sweep, keys = self.sweep, self.sweep.keys
        text = environment.get_template("report.md.jinja").render(
            report=self,
            sweep=sweep,
            title=f"Sweep over {', '.join(keys)}" if keys else "Runs of one configuration",
            percent=[f"{100 * alpha:g}" for alpha in (launch_alpha(sweep.launch), self.next_alpha)],
            power=f"{POWER:.0%}",
            figures=FIGURES,
            left_out=[run for run in sweep.runs if run.state != "finished" or run.diverged],
            swept={key: dict.fromkeys(text_of(each.values[key]) for each in sweep.variants) for key in keys},
            seeds=sorted({run.seed for run in sweep.runs}),
            pictures=pictures,
        )
        return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"  # of nested blocks

    def answer(self) -> str:
        """The comparison in a few short sentences: the baseline, then the variants by their verdicts."""
        base, total = self.sweep.baseline, len(self.sweep.runs)
        left = sum(run.state != "finished" for run in self.sweep.runs)
        continues = "; start the command of the sweep again to continue" if self.sweep.launches else ""
        missing = f" {left} of {total} runs {'has' if left == 1 else 'have'} not finished{continues}." if left else ""
        if not base.finished:
            subject = "No run" if left == total else f"No run of the baseline {base.label}"
            return f"{subject} has finished, so there is nothing to compare yet.{missing}"
        if not self.losses.comparable:
            return f"The runs are validated on different texts, so Tril does not compare their losses.{missing}"
        if not self.comparisons:
            loss = f"{spread(base.estimate('final_val_loss'))} nats per token"
            seeds = plural(len(base.finished), "seed")
            return f"There is one variant, {base.label}: final validation loss {loss} over {seeds}.{missing}"
        sentences = [f"Baseline {base.label}."]
        for verdict, beginning in ANSWERS.items():
            found = {label: each for label, each in self.comparisons.items() if each.verdict == verdict}
            is_shown = verdict in (BETTER, WORSE)
            labels = [named(label) + f" ({spread(each.difference, '+')})" * is_shown for label, each in found.items()]
            sentences += [f"{beginning}: {', '.join(labels)}."] * bool(labels)
        if (tuning := self.losses.tuning) is not None and tuning.ends:
            ends = ", ".join(map(named, tuning.ends))
            sentences.append(f"The best {tuning.key} is an end of its range for {ends}; extend the range.")
        return " ".join(sentences) + missing

    def basis(self) -> str:
        """How seeds are compared, and their correlation."""
        found = "paired, since all" if self.losses.paired else "not paired, since not all"
        sentence = f"Seeds are {found} variants have the same number of parameters."
        if (correlation := self.losses.correlation) is None:
            return sentence
        return f"{sentence} Over the seeds, two variants correlate by {correlation:.2f} on average."

    def compared_table(self) -> str:
        """Each variant compared with the baseline."""
        rows = []
        for label, each in self.comparisons.items():
            row = {"variant": label, "verdict": each.verdict}
            row[f"difference, {self.losses.unit}"] = spread(each.difference, "+")
            row["detectable difference"] = "-" if each.detectable is None else f"{each.detectable:.2g}"
            row["seeds in common"] = str(each.seeds)
            of_size, of_small = self.seeds_needed(each)
            rows.append(row | {"seeds for it": of_size, f"for {SMALL}": of_small})
        return table(rows, (0, 1))

    def seeds_needed(self, each: Comparison) -> tuple[str, ...]:
        """The seeds that find the difference of an undecided comparison, and SMALL, with one more launch."""
        if each.verdict != UNCLEAR:
            return "-", "-"
        level = self.next_alpha / len(self.comparisons)
        found = [each.seeds_needed(effect, level) for effect in (abs(each.difference.mean), SMALL)]
        return tuple(f"over {MAX_SEEDS}" if seeds is None else str(seeds) for seeds in found)

    def variant_table(self, figures: Mapping[str, tuple[str, str]] | None = None) -> str:
        """Losses and figures of each variant; the best losses only where they differ from the final ones."""
        losses = {"final_val_loss": "final loss, nats per token", "final_val_bpb": "final bits per byte"}
        if any(run.summary.get("best_val_loss") != run.summary.get("final_val_loss") for run in self.sweep.runs):
            losses |= {"best_val_loss": "best loss, nats per token"}
        rows = []
        for variant in self.sweep.variants:
            is_base = variant is self.sweep.baseline and len(self.sweep.variants) > 1
            row = {"variant": variant.label + " (baseline)" * is_base}
            row["seeds"] = f"{len(variant.finished)}" + f" of {len(variant.runs)}" * (variant.finished != variant.runs)
            row |= {heading: spread(variant.estimate(name)) for name, heading in losses.items()}
            means = {name: variant.estimate(name).mean for name in figures or ()}
            rows.append(row | {head: shown(means[name], form) for name, (head, form) in (figures or {}).items()})
        return table(rows)

    def tuning_table(self) -> str:
        """Loss of each variant and value on the documents that choose; "" unless a setting was tuned."""
        found = {} if self.losses.tuning is None else self.losses.tuning.losses
        values = dict.fromkeys(value for losses in found.values() for value in losses)
        rows = [(label, {x: shown(losses.get(x, math.nan), ".4f") for x in values}) for label, losses in found.items()]
        return table([{"variant": label} | row for label, row in rows])

    def warnings(self) -> Iterator[str]:
        """What makes the losses doubtful."""
        summaries = [run.summary for run in self.sweep.runs if run.summary]
        for name, words in CONDITIONS.items():
            if len(values := {text_of(summary.get(name)) for summary in summaries}) > 1:
                differ = f"The finished runs differ in their {words}: {'; '.join(sorted(values))}"
                yield f"{differ}. Differences between variants may come from that."
        if self.losses.comparable and self.losses.unit == BITS:
            yield "The finished runs differ in their tokenizer or training text, so they are compared by bits per byte."
        if parts := {partial_validation(summary.get("val_windows")) for summary in summaries} - {None}:
            scored = f"The losses are those of {' or '.join(sorted(map(str, parts)))} of the validation part"
            yield f"{scored}, to which trainer.limit_val_batches shortened it."
        if leaks := sum("LEAK" in str(summary.get("causality")) for summary in summaries):
            yield f"The losses of {plural(leaks, 'finished run')} are invalid: the model sees the tokens it predicts."

    def result_rows(self) -> Iterator[dict[str, object]]:
        """One row for each variant: the numbers of the report's tables with all digits."""
        for variant in self.sweep.variants:
            row = {"variant": variant.label, **variant.values, "baseline": variant is self.sweep.baseline}
            row |= {"seeds": len(variant.runs), "finished": len(variant.finished)}
            for name in LOSSES:
                row |= ends(name, variant.estimate(name))
            row |= {name: variant.estimate(name).mean for name in FIGURES}
            if each := self.comparisons.get(variant.label):
                row |= ends("difference", each.difference) | {"verdict": each.verdict, "common_seeds": each.seeds}
                row |= {"se": each.se, "df": each.df, "detectable": each.detectable}
            yield row

    def run_rows(self) -> Iterator[Mapping[str, object]]:
        """One row for each run: its state and the content of its summary."""
        for variant in self.sweep.variants:
            for run in variant.runs:
                row = {"variant": variant.label, **variant.values, "seed": run.seed, "state": run.state}
                summary = {name: value for name, value in run.summary.items() if name != "sample_with"}  # a path
                folder = run.folder.relative_to(self.sweep.folder).as_posix()
                yield row | {"message": run.message} | summary | {"folder": folder}


def read_report(
    folder: Path,
    baseline: str | None = None,
    margin: float | None = None,
    tune: str | None = None,
    candidate: str | None = None,
) -> Report:
    """The report of the folder of a sweep, or of several runs; for the other arguments see `read_sweep` and `Report`.

    Args:
        candidate: the only variant that is compared with the baseline, see `Sweep.find`; None: all are.

    Raises:
        ValueError: as `read_sweep` and `tuned`.
    """
    sweep = read_sweep(folder, baseline)
    if candidate is not None:
        sweep = replace(sweep, variants=(sweep.baseline, sweep.find("candidate", candidate)))
    losses = losses_of(sweep)
    if tune is not None:
        sweep, losses = tuned(sweep, losses, tune)
    return Report(sweep, losses, margin)


def ends(name: str, interval: Interval) -> dict[str, float | None]:
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}


def table(rows: Sequence[Mapping[str, str]], text_columns: Sequence[int] = (0,)) -> str:
    """Rows of plain text with their columns' headings as a Markdown table; "" without a row."""
    lines = [[*rows[0]], *([*row.values()] for row in rows)] if rows else []
    return markdown_table([[escape(cell) for cell in line] for line in lines], text_columns) if rows else ""


def shown(value: float, form: str) -> str:
    """A number in a table; NaN: there is none."""
    return "-" if math.isnan(value) else format(value, form) if math.isfinite(value) else "diverged"


def named(label: str) -> str:
    """A label as an item of a list: in parentheses if it contains commas."""
    return f"({label})" if ", " in label else label


def escape(text: str) -> str:
    """Text in one line without Markdown or HTML markup; an underscore within a word is not markup."""
    return re.sub(r"[\\`*|<>&\[\]~]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", printable(text))
