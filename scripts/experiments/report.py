"""The report of a sweep: report.md with its pictures, results.csv and runs.csv."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd

from tril.model.atomic_files import write_text
from tril.model.comparison import BETTER, DIVERGED, EQUAL, ONE_SEED, POWER, UNCLEAR, WORSE
from tril.model.formats import markdown_table, plural
from tril.scripts.experiments.losses import (
    UNFINISHED,
    Losses,
    compare_sweep,
    different_texts,
    launch_alpha,
    launch_count,
    losses_of,
    spread,
)
from tril.scripts.experiments.plots import Picture, draw
from tril.scripts.experiments.sweep import LOSSES, Sweep, Variant, read_sweep, scored_part, text_of
from tril.scripts.experiments.tuning import Tuning, tuned

FIGURES = {  # of a run -> heading and format
    "parameters": ("parameters", ",.0f"),
    "flops_per_token": ("FLOPs per token", ",.0f"),
    "training_flops": ("training FLOPs", ".3e"),
    "tokens_per_second": ("tokens/s", ",.0f"),
    "peak_memory_gb": ("peak memory, GB", ".2f"),
    "seconds": ("wall time, s", ",.0f"),
}
CONDITIONS = {"code": "code version", "device": "device", "precision": "precision", "threads": "number of threads"}
MAX_MESSAGE = 200  # characters of the error of a failed run
NOT_COMPARED = {  # verdict -> why there is none
    UNFINISHED: "runs are missing",
    ONE_SEED: "fewer than two seeds are common to both",
    DIVERGED: "a loss is not a finite number",
}


VERDICTS = [BETTER, WORSE, EQUAL, UNCLEAR, *NOT_COMPARED]  # in the order in which the answer names them


class Report:
    """What there is to say of a sweep.

    Args:
        losses: of the sweep.
        margin: nats per token, a difference below it counts as none; None: nothing is called equal.
        tuning: how the variants were chosen; None: the sweep has all.
    """

    def __init__(self, sweep: Sweep, losses: Losses, margin: float | None = None, tuning: Tuning | None = None) -> None:
        self.sweep, self.losses, self.tuning = sweep, losses, tuning
        self.margin, self.comparisons = margin, compare_sweep(losses, sweep, margin)

    def write(self, folder: Path) -> list[str]:
        """Writes the report and its pictures, and returns the names of the files."""
        pictures = draw(self.sweep, self.losses, folder, self.comparisons)
        files = {
            "report.md": self.text(pictures),
            "results.csv": pd.DataFrame(self.result_rows()).to_csv(index=False),
            "runs.csv": pd.DataFrame(run_rows(self.sweep)).to_csv(index=False),
        }
        for name, content in files.items():
            write_text(folder / name, content)
        return [*files, *(picture.file for picture in pictures.values())]

    def shown(self) -> str:
        """What to print: the answer and the comparisons, or the losses of one variant."""
        return f"{printable(self.answer())}\n\n{self.compared_table() or loss_table(self.sweep)}"

    def text(self, pictures: Mapping[str, Picture]) -> str:
        """The content of report.md, from its template."""
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        loader = FileSystemLoader(Path(__file__).parent)
        environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        environment.filters |= {"text": escape, "code": printable}
        sweep, launch = self.sweep, launch_count(self.sweep)
        text = environment.get_template("report.md.jinja").render(
            report=self,
            sweep=sweep,
            warnings=warnings(sweep),
            launch={"number": launch, "percent": f"{100 * launch_alpha(launch):g}"},
            power=f"{POWER:.0%}",
            loss_table=loss_table(sweep),
            cost_table=cost_table(sweep),
            left_out=left_out_table(sweep),
            swept={
                key: ", ".join(dict.fromkeys(text_of(each.values[key]) for each in sweep.variants))
                for key in sweep.keys
            },
            seeds=", ".join(str(seed) for seed in sorted({run.seed for run in sweep.runs})),
            pictures=pictures,
        )
        return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"  # of nested blocks

    @property
    def title(self) -> str:
        return f"Sweep over {', '.join(self.sweep.keys)}" if self.sweep.keys else "Runs of one configuration"

    def answer(self) -> str:
        """The comparison in a few short sentences: the baseline, then the variants by their verdicts."""
        base, total = self.sweep.baseline, len(self.sweep.runs)
        left = sum(run.state != "finished" for run in self.sweep.runs)
        missing = f" {left} of {total} runs {'has' if left == 1 else 'have'} not finished." if left else ""
        if not base.finished:
            subject = "No run" if left == total else f"No run of the baseline {base.label}"
            return f"{subject} has finished, so there is nothing to compare yet.{missing}"
        if sizes := different_texts(self.sweep.runs):
            cause = f"The runs have different validation texts, of {sizes}, so their losses are not compared"
            return f"{cause}; each variant stands alone.{missing}"
        if not self.comparisons:
            loss = f"{spread(base.estimate('final_val_loss'))} nats per token"
            seeds = plural(len(base.finished), "seed")
            return f"There is one variant, {base.label}: final validation loss {loss} over {seeds}.{missing}"
        groups: dict[str, list[str]] = {}
        for label, each in sorted(self.comparisons.items(), key=lambda item: VERDICTS.index(item[1].verdict)):
            found = f" ({spread(each.difference, '+')})" if each.verdict in (BETTER, WORSE) else ""
            reason = NOT_COMPARED.get(each.verdict)
            verdict = f"Not compared, because {reason}" if reason else each.verdict.capitalize()
            groups.setdefault(verdict, []).append(f"{named(label)}{found}")
        parts = [f"{verdict}: {', '.join(labels)}." for verdict, labels in groups.items()]
        return " ".join([f"Baseline {base.label}.", *parts]) + self.tuning_note() + missing

    def compared_table(self) -> str:
        """Each variant compared with the baseline; "" without another variant."""
        rows = [["variant", "verdict", f"difference, {self.losses.unit}", "detectable difference", "seeds in common"]]
        for label, each in self.comparisons.items():
            detectable = "-" if each.detectable is None else f"{each.detectable:.2g}"
            rows.append([label, each.verdict, spread(each.difference, "+"), detectable, str(each.seeds)])
        return table(rows, (0, 1), kept=4) if len(rows) > 1 else ""

    def tuning_note(self) -> str:
        """Which variants have an end of the tuned range: a better value may be outside."""
        if self.tuning is None or not self.tuning.ends:
            return ""
        ends = ", ".join(map(named, self.tuning.ends))
        return f" The best {self.tuning.key} is an end of its range for {ends}; extend the range."

    def tuning_table(self) -> str:
        """Loss of each variant and value on the documents that choose; "" unless a setting was tuned."""
        found = {} if self.tuning is None else self.tuning.losses
        values = list(dict.fromkeys(value for losses in found.values() for value in losses))
        rows = [["variant", *values]]
        for label, losses in found.items():
            texts = {value: f"{loss:.4f}" if math.isfinite(loss) else "diverged" for value, loss in losses.items()}
            rows.append([label, *(texts.get(value, "-") for value in values)])
        return table(rows, kept=len(rows[0])) if found else ""

    def result_rows(self) -> Iterator[dict[str, object]]:
        """One row for each variant: the numbers of the report's tables with all digits."""
        for variant in self.sweep.variants:
            row = {"variant": variant.label, **variant.values, "baseline": variant is self.sweep.baseline}
            row |= {"seeds": len(variant.runs), "finished": len(variant.finished)}
            for name in LOSSES:
                row |= ends(name, variant.estimate(name))
            row |= {name: figure_of(variant, name) for name in FIGURES}
            if each := self.comparisons.get(variant.label):
                row |= ends("difference", each.difference) | {"verdict": each.verdict, "common_seeds": each.seeds}
                row |= {"se": each.se, "df": each.df, "detectable": each.detectable}
            yield row


def read_report(
    folder: Path, baseline: str | None = None, margin: float | None = None, tune: str | None = None
) -> Report:
    """The report of the folder of a sweep, or of several runs; for the other arguments see `read_sweep` and `Report`.

    Raises:
        ValueError: as `read_sweep` and `tuned`.
    """
    sweep, tuning = read_sweep(folder, baseline), None
    losses = losses_of(sweep)
    if tune is not None:
        sweep, losses, tuning = tuned(sweep, losses, tune)
    return Report(sweep, losses, margin, tuning)


def ends(name: str, interval) -> dict[str, float | None]:
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}


def run_rows(sweep: Sweep) -> Iterator[dict[str, object]]:
    """One row for each run: its state and the content of its summary."""
    for variant in sweep.variants:
        for run in variant.runs:
            row: dict[str, object] = {"variant": variant.label, **variant.values, "seed": run.seed, "state": run.state}
            summary = {name: value for name, value in run.summary.items() if name != "sample_with"}  # a path
            folder = run.folder.relative_to(sweep.folder).as_posix()
            yield row | {"message": run.message} | summary | {"folder": folder}


def warnings(sweep: Sweep) -> Iterator[str]:
    """What makes the losses doubtful."""
    summaries = [run.summary for run in sweep.runs if run.summary]
    for name, words in CONDITIONS.items():
        if len(values := {text_of(summary.get(name)) for summary in summaries}) > 1:
            differ = f"The finished runs differ in their {words}: {'; '.join(sorted(values))}"
            yield f"{differ}. Differences between variants may come from that."
    if not different_texts(sweep.runs) and len({summary.get("data_fingerprint") for summary in summaries}) > 1:
        yield "The finished runs differ in their text or tokenizer, so they are compared by bits per byte."
    if (part := scored_part(sweep.runs)) is not None:
        yield f"The losses are those of {part} of the validation part, to which trainer.limit_val_batches shortened it."
    if leaks := sum("LEAK" in str(summary.get("causality")) for summary in summaries):
        yield f"The losses of {plural(leaks, 'finished run')} are invalid: the model sees the tokens it predicts."


def loss_table(sweep: Sweep) -> str:
    """The losses of each variant; the best ones only where they differ from the final ones."""
    names = {"final_val_loss": "final loss, nats per token", "final_val_bpb": "final bits per byte"}
    if any(run.summary.get("best_val_loss") != run.summary.get("final_val_loss") for run in sweep.runs):
        names |= {"best_val_loss": "best loss, nats per token"}
    rows = [["variant", *names.values(), "seeds"]]
    for variant in sweep.variants:
        mark = " (baseline)" if variant is sweep.baseline and sweep.others else ""
        done = f"{len(variant.finished)}" + f" of {len(variant.runs)}" * (len(variant.finished) < len(variant.runs))
        rows.append([variant.label + mark, *(spread(variant.estimate(name)) for name in names), done])
    return table(rows, kept=2)


def cost_table(sweep: Sweep) -> str:
    """Sizes of the variants, and speed and memory of their training."""
    rows = [["variant", *(heading for heading, _ in FIGURES.values())]]
    for variant in sweep.variants:
        values = [(figure_of(variant, name), form) for name, (_, form) in FIGURES.items()]
        rows.append([variant.label, *("-" if value is None else format(value, form) for value, form in values)])
    return table(rows)


def figure_of(variant: Variant, name: str) -> float | None:
    """The mean over the finished seeds; before one is finished, as planned."""
    values = [value for run in variant.finished or variant.runs[:1] if (value := run.figure(name)) is not None]
    return sum(values) / len(values) if values else None


def left_out_table(sweep: Sweep) -> str:
    """The runs without a loss, and why; "" if all have one."""
    rows = [["variant", "seed", "state", "last line of its output, if it failed"]]
    for variant in sweep.variants:
        for run in variant.runs:
            if run.state != "finished" or run.diverged:
                state = "diverged" if run.state == "finished" else run.state
                rows.append([variant.label, str(run.seed), state, run.message[:MAX_MESSAGE]])
    return table(rows, (0, 2, 3), kept=4) if len(rows) > 1 else ""


def table(rows: Sequence[Sequence[str]], text_columns: Sequence[int] = (0,), kept: int = 1) -> str:
    """Rows of plain text, the first one the header, as a Markdown table.

    Columns that are equal in all rows, apart from the first `kept` ones, become a line below the table.
    """
    columns, below = [], []
    for i, column in enumerate(zip(*rows, strict=True)):
        if i >= kept and len(rows) > 2 and len(set(column[1:])) == 1:
            below.append(f"{column[0]}: {column[1]}")
        else:
            columns.append(column)
    lines = [[escape(cell) for cell in row] for row in zip(*columns, strict=True)]
    text = markdown_table(lines, text_columns)
    return f"{text}\n\nEqual in all rows: {escape('; '.join(below))}." if below else text


def named(label: str) -> str:
    """A label as an item of a list: in parentheses if it contains commas."""
    return f"({label})" if ", " in label else label


def escape(text: str) -> str:
    """Text in one line without Markdown or HTML markup; an underscore within a word is not markup."""
    return re.sub(r"[\\`*|<>&\[\]~]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", printable(text))


def printable(text: str) -> str:
    """Text in one line without control characters for a terminal."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
