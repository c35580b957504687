"""The report of a sweep: report.md, report.html (one file with its pictures), results.csv, runs.csv."""

import base64
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pandas as pd

from tril.model.atomic_files import write_text
from tril.model.comparison import BETTER, DIVERGED, EQUAL, ONE_SEED, POWER, UNCLEAR, WORSE, Comparison
from tril.scripts.cli.formats import markdown_table, plural
from tril.scripts.experiments.losses import UNFINISHED, Losses, compare_sweep, launch_alpha, launch_count, spread
from tril.scripts.experiments.nuisance import Tuning, read_tuning
from tril.scripts.experiments.plots import draw
from tril.scripts.experiments.scaling import PICTURE, points_of, scaling_section
from tril.scripts.experiments.sweep import LOSSES, Sweep, Variant, scored_part, text_of

FIGURES = {  # of a run -> heading and format
    "parameters": ("parameters", ",.0f"),
    "flops_per_token": ("FLOPs per token", ",.0f"),
    "training_flops": ("training FLOPs", ".3e"),
    "tokens_per_second": ("tokens/s", ",.0f"),
    "peak_memory_gb": ("peak memory, GB", ".2f"),
    "seconds": ("wall time, s", ",.0f"),
}
CONDITIONS = {"code": "code version", "device": "device", "precision": "precision", "threads": "number of threads"}
SETTINGS = (  # of a run that a reader asks for first
    "model.n_layers model.dim model.n_heads model.n_kv_heads model.head_dim model.mlp model.mlp_ratio model.norm "
    "model.pos model.window model.context_length model.resid_dropout data.source data.path data.tokenizer.kind "
    "data.tokenizer.vocab_size data.batch_size optim.kind optim.lr_scale trainer.max_steps "
    "trainer.accumulate_grad_batches"
).split()
MAX_MESSAGE = 200  # characters of the error of a failed run
VERDICTS = {  # -> words of the sentence that answers
    EQUAL: "equal to it within the margin",
    UNCLEAR: "not distinguishable from it",
    UNFINISHED: "not compared yet, because runs are missing",
    ONE_SEED: "not compared, because fewer than two seeds are common to both",
    DIVERGED: "not compared, because a loss is not a finite number",
}


@dataclass(frozen=True)
class Request:
    """What is compared: the settings of a report that are published with it.

    Attributes:
        baseline: a variant, see `read_sweep`.
        which: validation whose losses are compared.
        margin: nats per token, a difference below it counts as none.
        fit: "scaling": with a law of the loss by size and tokens.
    """

    baseline: str | None = None
    which: Literal["final", "best"] = "final"
    margin: float | None = None
    fit: Literal["scaling"] | None = None


def write_report(sweep: Sweep, losses: Losses, request: Request, folder: Path, *, published: bool) -> str:
    """Writes the report and its pictures, and returns what to print.

    Args:
        losses: of the sweep, for `request.which`.
        published: without report.html, which would hold the pictures once more.
    """
    comparisons = compare_sweep(losses, sweep, request.margin)
    law = scaling_section(points_of(sweep), folder) if request.fit == "scaling" else ""
    pictures = draw(sweep, request.which, losses.unit, folder, comparisons)
    text = report_text(sweep, request, losses, comparisons, pictures=pictures, law=law, published=published)
    runs = pd.DataFrame(run_rows(sweep))
    files = {
        "report.md": text,
        "results.csv": pd.DataFrame(result_rows(sweep, comparisons)).to_csv(index=False),
        "runs.csv": runs.to_csv(index=False),
    }
    if not published:
        files["report.html"] = page(text, folder)
    for name, content in files.items():
        write_text(folder / name, content)
    shown = compared_table(comparisons, losses.unit) if comparisons else loss_table(sweep)
    names = ", ".join([*files, *(picture.file for picture in pictures.values()), *[PICTURE] * bool(law)])
    return f"{printable(answer(sweep, request, losses, comparisons))}\n\n{shown}\n\n{folder}: {names}"


def answer(sweep: Sweep, request: Request, losses: Losses, comparisons: Mapping[str, Comparison]) -> str:
    """The comparison in one sentence, and how many runs are not finished."""
    base, total = sweep.baseline, len(sweep.runs)
    left = sum(run.state != "finished" for run in sweep.runs)
    missing = f" {left} of {total} runs {'has' if left == 1 else 'have'} not finished." if left else ""
    if not base.finished:
        subject = "No run" if left == total else f"No run of the baseline {base.label}"
        return f"{subject} has finished, so there is nothing to compare yet.{missing}"
    if not comparisons:
        loss = f"{spread(base.estimate(f'{request.which}_val_loss'))} nats per token"
        seeds = "one seed (no interval)" if len(base.finished) == 1 else f"{len(base.finished)} seeds"
        return f"There is one variant, {base.label}: {request.which} validation loss {loss} over {seeds}.{missing}"
    parts = [
        f"{named(label)} is {each.verdict} by {spread(each.difference).lstrip('-')} {losses.unit}"
        for verdict in (BETTER, WORSE)
        for label, each in comparisons.items()
        if each.verdict == verdict
    ]
    for verdict, words in VERDICTS.items():
        labels = [named(label) for label, each in comparisons.items() if each.verdict == verdict]
        if labels:
            parts.append(f"{', '.join(labels)} {'is' if len(labels) == 1 else 'are'} {words}")
    return f"Against {named(base.label)}: {'; '.join(parts)}.{missing}"


def report_text(
    sweep: Sweep,
    request: Request,
    losses: Losses,
    comparisons: Mapping[str, Comparison],
    *,
    pictures: Mapping,
    law: str,
    published: bool,
) -> str:
    """The content of report.md, from its template."""
    launch, tunings = launch_count(sweep), read_tuning(sweep)
    return render(
        Path(__file__).with_name("report.md.jinja"),
        title=f"Sweep over {', '.join(sweep.keys)}" if sweep.keys else "Runs of one configuration",
        answer=answer(sweep, request, losses, comparisons),
        warnings=warnings(sweep),
        sweep=sweep,
        request=request,
        losses=losses,
        launch={"number": launch, "percent": f"{100 * launch_alpha(launch):g}"},
        power=f"{POWER:.0%}",
        compared=compared_table(comparisons, losses.unit) if comparisons else "",
        remarks=remarks(sweep, tunings),
        loss_table=loss_table(sweep),
        cost_table=cost_table(sweep),
        setting_table=setting_table(sweep),
        unfinished=unfinished_table(sweep),
        swept={key: ", ".join(dict.fromkeys(text_of(x.values[key]) for x in sweep.variants)) for key in sweep.keys},
        seeds=", ".join(str(seed) for seed in sorted({run.seed for run in sweep.runs})),
        commands=commands(sweep),
        tuning=tuning_table(tunings) if tunings else "",
        pictures=pictures,
        law=law,
        published=published,
    )


def render(template: Path, **values: object) -> str:
    """The text of a Markdown template. It escapes texts by the filter `text`, and those in code by `code`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(template.parent)
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"text": escape, "code": printable}
    text = environment.get_template(template.name).render(**values)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"  # of nested blocks


def warnings(sweep: Sweep) -> Iterator[str]:
    """What makes the losses doubtful."""
    summaries = [run.summary for run in sweep.runs if run.summary]
    for name, words in CONDITIONS.items():
        if len(found := {text_of(summary.get(name)) for summary in summaries}) > 1:
            differ = f"The finished runs differ in their {words}: {'; '.join(sorted(found))}"
            yield f"{differ}. Differences between variants may come from that."
    if len({summary.get("data_fingerprint") for summary in summaries}) > 1:
        yield "The finished runs differ in their text or tokenizer: compare bits per byte, not nats per token."
    if (part := scored_part(sweep.runs)) is not None:
        yield f"The losses are those of {part} of the validation part, to which trainer.limit_val_batches shortened it."
    if leaks := sum("LEAK" in str(summary.get("causality")) for summary in summaries):
        yield f"The losses of {plural(leaks, 'finished run')} are invalid: the model sees the tokens it predicts."


def remarks(sweep: Sweep, tunings: Mapping[str, Tuning]) -> Iterator[str]:
    """What a reader of the comparisons must know of single variants."""
    paired = {run.seed for run in sweep.baseline.finished}
    for variant in sweep.variants:
        seeds = {run.seed for run in variant.runs} | paired
        if left := sorted(seeds - (paired & {run.seed for run in variant.finished})):
            yield f"{variant.label}: left out, because not finished in both: seed {', '.join(map(str, left))}."
        if bad := [str(run.seed) for run in variant.finished if run.diverged]:
            yield f"{variant.label}: the loss with seed {', '.join(bad)} is not a finite number."
    for label, tuning in tunings.items():
        if tuning.at_edge:
            yield f"{label}: its tuned value, {tuning.chosen}, is an end of the range; a better one may be outside."


def compared_table(comparisons: Mapping[str, Comparison], unit: str) -> str:
    """Each variant compared with the baseline."""
    rows = [["variant", "verdict", f"difference, {unit}", "seeds in common", "detectable difference"]]
    for label, each in comparisons.items():
        detectable = "-" if each.detectable is None else f"{each.detectable:.2g}"
        rows.append([label, each.verdict, spread(each.difference, "+"), str(each.seeds), detectable])
    return table(rows, (0, 1))


def loss_table(sweep: Sweep) -> str:
    """The losses of each variant; the best ones only where they differ from the final ones."""
    names = {"final_val_loss": "final loss, nats per token", "final_val_bpb": "final bits per byte"}
    if any(run.summary.get("best_val_loss") != run.summary.get("final_val_loss") for run in sweep.runs):
        names |= {"best_val_loss": "best loss, nats per token"}
    rows = [["variant", "seeds", *names.values()]]
    for variant in sweep.variants:
        mark = " (baseline)" if variant is sweep.baseline and sweep.others else ""
        done = f"{len(variant.finished)}" + f" of {len(variant.runs)}" * (len(variant.finished) < len(variant.runs))
        rows.append([variant.label + mark, done, *(spread(variant.estimate(name)) for name in names)])
    return table(rows)


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


def setting_table(sweep: Sweep) -> str:
    """The settings of the runs that have started, and what they ran on."""
    rows = [["setting", "value"]]
    finished = [run.summary for run in sweep.runs if run.summary]
    values = {name: [text_of(run.settings.get(name)) for run in sweep.runs if run.settings] for name in SETTINGS}
    for name, words in {"tokens": "training tokens", **CONDITIONS}.items():
        values[words] = [text_of(summary.get(name)) for summary in finished]
    for name, texts in values.items():
        distinct = list(dict.fromkeys(texts))
        if set(distinct) - {"null"}:
            rows.append([name, distinct[0] if len(distinct) == 1 else f"differs: {'; '.join(distinct)}"])
    return table(rows, (0, 1)) if len(rows) > 1 else ""


def unfinished_table(sweep: Sweep) -> str:
    """The runs that are not finished, with the error of a failed one; "" if all are."""
    rows = [["variant", "seed", "state", "last line of its output, if it failed"]]
    for variant in sweep.variants:
        for run in variant.runs:
            if run.state != "finished":
                rows.append([variant.label, str(run.seed), run.state, run.message[:MAX_MESSAGE]])
    return table(rows, (0, 2, 3)) if len(rows) > 1 else ""


def tuning_table(tunings: Mapping[str, Tuning]) -> str:
    """Loss on the tuning text of each variant and value; the chosen one is marked."""
    values = list(dict.fromkeys(value for tuning in tunings.values() for value in tuning.losses))
    rows = [["variant", *values]]
    for label, tuning in tunings.items():
        cells = []
        for value in values:
            loss = tuning.losses.get(value)
            text = "-" if loss is None else f"{loss:.4f}" if math.isfinite(loss) else "failed or diverged"
            cells.append(f"{text} (chosen)" if value == tuning.chosen else text)
        rows.append([label, *cells])
    return table(rows)


def commands(sweep: Sweep) -> list[tuple[str, str]]:
    """A description and the command of each launch, as far as sweep.json has them."""
    found = []
    for number, launch in enumerate(sweep.index.get("launches", []), 1):
        seeds = f"seed {', '.join(map(str, launch['seeds']))}" if launch["seeds"] else "more variants"
        found.append((f"Launch {number} ({seeds}; {launch['date']}):", str(launch["command"])))
    return found


def result_rows(sweep: Sweep, comparisons: Mapping[str, Comparison]) -> Iterator[dict[str, object]]:
    """One row for each variant: the numbers of the report's tables with all digits."""
    for variant in sweep.variants:
        row = {"variant": variant.label, **variant.values, "baseline": variant is sweep.baseline}
        row |= {"seeds": len(variant.runs), "finished": len(variant.finished)}
        for name in LOSSES:
            row |= ends(name, variant.estimate(name))
        row |= {name: figure_of(variant, name) for name in FIGURES}
        if each := comparisons.get(variant.label):
            row |= ends("difference", each.difference) | {"verdict": each.verdict, "common_seeds": each.seeds}
            row |= {"se": each.se, "df": each.df, "detectable": each.detectable}
        yield row


def ends(name: str, interval) -> dict[str, float | None]:
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}


def run_rows(sweep: Sweep) -> Iterator[dict[str, object]]:
    """One row for each run: its state and the content of its summary."""
    for variant in sweep.variants:
        for run in variant.runs:
            row: dict[str, object] = {"variant": variant.label, **variant.values, "seed": run.seed, "state": run.state}
            summary = {name: value for name, value in run.summary.items() if name != "sample_with"}  # a path
            yield row | {"message": run.message} | summary | {"folder": run.folder.relative_to(sweep.folder).as_posix()}


def page(text: str, folder: Path) -> str:
    """The report as one HTML file: its Markdown, with the pictures of the folder inside."""
    from jinja2 import Environment, FileSystemLoader
    from markdown_it import MarkdownIt
    from markupsafe import Markup

    def inline(match: re.Match) -> str:
        return f'<img src="data:image/png;base64,{base64.b64encode((folder / match[1]).read_bytes()).decode()}"'

    body = MarkdownIt("js-default").render(text)  # it escapes HTML
    body = re.sub(r'<img src="([\w.]+)"', inline, body)
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    title = text.partition("\n")[0].removeprefix("# ")
    return environment.get_template("page.html").render(title=title, body=Markup(body))  # noqa: S704


def table(rows: Sequence[Sequence[str]], text_columns: Sequence[int] = (0,)) -> str:
    """Rows of plain text, the first one the header, as a Markdown table."""
    return markdown_table([[escape(cell) for cell in row] for row in rows], text_columns)


def named(label: str) -> str:
    """A label as an item of a list: in parentheses if it contains commas."""
    return f"({label})" if ", " in label else label


def escape(text: str) -> str:
    """Text in one line without Markdown or HTML markup; an underscore within a word is not markup."""
    return re.sub(r"[\\`*|<>&\[\]~]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", printable(text))


def printable(text: str) -> str:
    """Text in one line without control characters for a terminal."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
