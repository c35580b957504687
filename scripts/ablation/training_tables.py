"""The tables of a sweep's report about training: its length, learning rates, and their tuning with its cost."""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path

from tril.scripts.ablation.plot_style import size
from tril.scripts.ablation.report_tables import Table, figure
from tril.scripts.ablation.results import Sweep, Variant, renamed
from tril.scripts.ablation.run_files import Run
from tril.scripts.ablation.tuning_results import Tuning

Configs = Mapping[Path, Mapping[str, object]]  # folder of a run -> its settings by dotted names


def training(sweep: Sweep, configs: Configs) -> Table:
    """Steps, epochs, warm-up and multiplier of the learning rates of each variant, by its runs that have started."""

    def row(run: Run) -> tuple[str, ...]:
        config, summary = configs[run.folder], run.summary or {}
        steps, tokens = summary.get("steps", config.get("trainer.max_steps")), summary.get("tokens")
        text_tokens, warmup = summary.get("training_text_tokens"), config.get("optim.schedule.warmup_steps")
        return (
            "-" if steps is None else f"{steps:,}",
            "-" if tokens is None else f"{tokens:,}",
            "-" if tokens is None or not text_tokens else f"{tokens / text_tokens:.2f}",
            "-" if warmup is None or not steps else f"{100 * warmup / steps:.1f} %",  # pyright: ignore[reportOperatorIssue] numbers
            f"{config.get('optim.lr_scale', 1.0):g}",
        )

    rows = []
    for variant in sweep.variants:
        of_runs = dict.fromkeys(row(run) for run in variant.runs if run.folder in configs)
        columns = zip(*of_runs, strict=True) if of_runs else [("-",)] * 5
        rows.append([variant.label, *(", ".join(dict.fromkeys(column)) for column in columns)])
    names = ("steps", "training tokens", "epochs", "warm-up, of all steps", "learning-rate multiplier")
    return Table(["variant", *names], rows)


def effective_rates(sweep: Sweep, configs: Configs) -> Table:
    """Peak learning rate of each kind of matrix in each variant; without rows if no variant can be built.

    Kinds whose rates are equal in every variant share a column.
    """
    rates = {}
    for variant in sweep.variants:
        config = next((configs[run.folder] for run in variant.runs if run.folder in configs), None)
        rates[variant.label] = {} if config is None else rates_of(config)
    columns: dict[tuple[str, ...], list[str]] = {}  # rates in all variants -> kinds
    for kind in dict.fromkeys(kind for of_variant in rates.values() for kind in of_variant):
        column = tuple(f"{each[kind]:.3g}" if kind in each else "-" for each in rates.values())
        columns.setdefault(column, []).append(kind)
    rows = [list(row) for row in zip(rates, *columns, strict=True)] if columns else []
    return Table(["variant", *map(", ".join, columns.values())], rows)


def rates_of(config: Mapping[str, object]) -> dict[str, float]:
    """Effective rates of a run by kind of matrix; {} if this version cannot build the model of its settings."""
    import torch

    from tril.model.gpt import GPT, GPTConfig
    from tril.model.training.optim import OptimConfig, effective_rates

    def build(kind: type, group: str, **more):
        keys = {name: f"{group}.{name}" for name in (field.name for field in fields(kind))}
        return kind(**{name: renamed(key, config[key]) for name, key in keys.items() if key in config} | more)

    try:
        # the tokenizer's size of the vocabulary is not in the settings, and no rate depends on it
        model, optim = build(GPTConfig, "model", vocab_size=1), build(OptimConfig, "optim")
        with torch.device("meta"):
            return effective_rates(GPT(model), optim)
    except (ValueError, TypeError):
        return {}


def tuning_losses(tunings: Mapping[str, Tuning]) -> Table:
    """Loss on the tuning text of each variant and multiplier; the chosen one is marked."""
    multipliers = sorted({multiplier for tuning in tunings.values() for multiplier in tuning.losses})

    def text(tuning: Tuning, multiplier: float) -> str:
        loss = tuning.losses.get(multiplier)
        if loss is None:
            return "-"
        edge = ", an end of the range" if tuning.at_edge else ""
        mark = f" (chosen{edge})" if multiplier == tuning.lr_scale else ""
        return f"{loss:.4f}{mark}" if math.isfinite(loss) else "failed or diverged"

    rows = [[label, *(text(tuning, each) for each in multipliers)] for label, tuning in tunings.items()]
    return Table(["variant", *(f"{each:g}" for each in multipliers)], rows)


def tuning_costs(sweep: Sweep, tunings: Mapping[str, Tuning]) -> Table:
    """Time and FLOPs of the trials next to those of the finished runs, with the sums over all variants."""
    rows = []
    for variant in sweep.variants:
        if tuning := tunings.get(variant.label):
            trials = [tuning.trials, tuning.failed, tuning.seconds, tuning.training_flops]
            runs = [_total(variant, lambda run: (run.summary or {}).get("seconds"))]
            runs += [_total(variant, lambda run: size(run, "training_flops"))]
            rows.append((variant.label, [*trials, len(variant.finished), *runs]))
    if len(rows) > 1:
        rows.append(("all", [sum(column) for column in zip(*(values for _, values in rows), strict=True)]))
    header = ["variant", "trials", "failed", "time of the trials, s", "FLOPs of the trials"]
    header += ["runs", "time of the runs, s", "FLOPs of the runs", "trials / runs, FLOPs"]
    shown = []
    for label, values in rows:
        ratio = f"{values[3] / values[6]:.2f}" if values[6] else "-"
        shown.append([label, *(figure(value, ",.0f") for value in values), ratio])
    return Table(header, shown)


def _total(variant: Variant, value_of: Callable[[Run], float | None]) -> float:
    """Sum over the finished runs that have the value."""
    return sum(value for run in variant.finished if (value := value_of(run)) is not None)
