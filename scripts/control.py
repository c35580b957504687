"""Shows what the causal mask does:  python scripts/control.py masked=outputs/DATE/TIME unmasked=outputs/DATE/TIME

Takes a run with the mask and the same run without it. Measures the loss that each reports in one pass over a text, and
its loss when it sees the prefix alone. Prints a table; writes control.json, control.md and control.png.
"""

import json
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from tril.data.settings import build, strict_settings
from tril.model.runs import find_checkpoint, run_folder
from tril.scripts.cli.config import flatten
from tril.scripts.cli.entry import entry
from tril.scripts.cli.errors import user_errors, writable
from tril.scripts.cli.finished_run import Run, read_run, sample_windows, validation_tokens
from tril.scripts.cli.formats import markdown_table
from tril.scripts.cli.typed import Typed

if TYPE_CHECKING:
    from tril.model.intervals import Interval

COMMANDS = {"masked": "python train.py", "unmasked": "python train.py experiment=control_no_mask"}
TEXTS = (*COMMANDS, "out")  # keys whose value is text as it was typed
SAME = ("seed", "model", "optim", "trainer")  # settings that must be equal in both runs, except for the mask
ROWS = {  # of the table: heading -> figure of a side, bytes per token
    "parameters": lambda side, _: f"{side['parameters']:,}",
    "training loss, last logged": lambda side, _: f"{side['curves']['train'][-1][1]:.4f}",
    "validation loss, as the run logged it": lambda side, _: f"{side['curves']['val'][-1][1]:.4f}",
    "one-pass loss": lambda side, _: _with_error(side["one_pass"]),
    "prefix-only loss": lambda side, _: _with_error(side["prefix_only"]),
    "prefix-only minus one-pass loss": lambda side, _: _with_error(side["gap"]),
    "bits per byte, one-pass": lambda side, size: f"{side['one_pass'].mean / math.log(2) / size:.4f}",
    "bits per byte, prefix-only": lambda side, size: f"{side['prefix_only'].mean / math.log(2) / size:.4f}",
}


@dataclass(frozen=True, config=strict_settings())
class ControlConfig:
    """Settings, as in configs/control.yaml."""

    masked: str | None
    unmasked: str | None
    windows: Annotated[int, Field(ge=2)]  # an interval needs two
    prompts: Annotated[list[str], Field(min_length=1)]
    max_new_tokens: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    seed: Annotated[int, Field(ge=0, lt=2**64)]  # the range of torch.Generator
    out: str | None


@entry("control", TEXTS)
def main(cfg: dict, typed: Typed) -> None:
    with user_errors():
        settings = build(ControlConfig, cfg)
        paths = {name: find(name, getattr(settings, name)) for name in COMMANDS}
    # Importing torch takes a second, so wrong settings are reported before.
    from tril.model.causality.mask_control import read_curves
    from tril.model.checkpoint import load

    sides: dict[str, dict] = {}
    with user_errors():
        runs = {name: read_run(path) for name, path in paths.items()}
        check_pair(runs)
        for name, path in paths.items():
            sides[name] = {"checkpoint": os.path.relpath(path), "curves": read_curves(run_folder(path))}
        models = {name: load(path) for name, path in paths.items()}
        tokens, eot_id = validation_tokens(runs["masked"]), models["masked"].eot_id
        windows = sample_windows(runs["masked"], tokens, settings.windows, eot_id)
        sampling = {key: getattr(settings, key) for key in ("max_new_tokens", "temperature", "seed")}
        for name, lm in models.items():
            texts = lm.generate(settings.prompts, **sampling)
            sides[name] |= {
                "parameters": lm.model.n_parameters(),
                "samples": list(zip(settings.prompts, texts, strict=True)),
            }
        folder = writable(settings.out or run_folder(paths["unmasked"]) / "control", "out")
    report = describe(runs["masked"], windows, sampling)
    report["prefix_only_unmasked_minus_masked"] = measure(models, windows, sides)
    write(folder, report, sides)


def find(name: str, folder: str | None) -> Path:
    """The last checkpoint of a run. Not the best one: without the mask it is chosen by a false loss."""
    if folder is None:
        raise ValueError(f"{name} is missing; give the folder of a run of `{COMMANDS[name]}`: {name}=outputs/DATE/TIME")
    return find_checkpoint(folder, prefer=("last",))


def check_pair(runs: dict[str, Run]) -> None:
    """Raises ValueError unless the two runs differ in the mask and in nothing else that changes their losses."""
    masked, unmasked = runs["masked"], runs["unmasked"]
    for name, causal in (("masked", True), ("unmasked", False)):
        if runs[name].metadata["config"]["causal"] != causal:
            raise ValueError(
                f"{name}={runs[name].checkpoint} has model.causal={not causal}; give a run of `{COMMANDS[name]}`"
            )
    prints = [str(run.metadata["data"].get("fingerprint"))[:12] for run in (masked, unmasked)]
    if prints[0] != prints[1] or masked.metadata["tokenizer"] != unmasked.metadata["tokenizer"]:
        raise ValueError(
            f"the runs have other data or tokenizers (fingerprints {' and '.join(prints)}); train both on the same text"
        )
    a, b = comparable(masked), comparable(unmasked)
    differ = [f"{key}={a.get(key)} and {b.get(key)}" for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)]
    if differ:
        raise ValueError(
            f"the runs differ in more than the mask ({', '.join(differ)}); train both with the same settings"
        )
    if masked.settings["data"].get("document_mask"):
        raise ValueError(
            "data.document_mask=true cuts windows into documents, which the control does not; "
            "train both with data.document_mask=false"
        )


def comparable(run: Run) -> dict[str, object]:
    """The settings that must be equal in both runs, by dotted names."""
    data = {key: run.settings["data"].get(key) for key in ("batch_size", "document_mask")}
    values = flatten({key: run.settings[key] for key in SAME} | {"data": data, "steps done": run.steps})
    return {key: value for key, value in values.items() if key != "model.causal"}


def describe(run: Run, windows, sampling: dict) -> dict:
    """How the figures are measured, and what both sides have in common."""
    from tril.data.prepared import val_bytes_per_token

    meta, (numbers, text, clusters) = run.metadata["data"], windows
    return {
        "seed": run.settings["seed"],
        "steps": run.steps,
        "data_fingerprint": meta["fingerprint"],
        "windows": {"of": "the validation part", "length": text.ids.shape[1], "numbers": numbers.tolist()},
        "observations": {"unit": clusters.unit, "described": clusters.describe()} | clusters.counts(),
        "losses": f"nats per token, with 95 % intervals over {clusters.unit}, computed in float32 on the CPU",
        "sampling": sampling,
        "uniform_guess": math.log(meta["vocab_size"]),
        "bytes_per_token": val_bytes_per_token(meta),
        "limit_val_batches": run.settings["trainer"].get("limit_val_batches"),
    }


def measure(models: dict, windows, sides: dict[str, dict]):
    """Adds the losses to both sides; returns the difference of their prefix-only losses, unmasked minus masked."""
    from tril.model.causality.prefix_loss import one_pass_nll, prefix_only_nll

    prefix_only, (_, text, clusters) = {}, windows
    ids, targets = text.ids, text.targets
    for name, lm in models.items():
        print(f"{name}: {len(ids)} windows, {ids.shape[1]} prefixes each", file=sys.stderr, flush=True)
        one_pass, prefix_only[name] = one_pass_nll(lm.model, ids, targets), prefix_only_nll(lm.model, ids, targets)
        losses = {"one_pass": one_pass, "prefix_only": prefix_only[name], "gap": prefix_only[name] - one_pass}
        sides[name] |= {key: clusters.mean(clusters.sums(nll)).interval() for key, nll in losses.items()}
    return clusters.mean(clusters.sums(prefix_only["unmasked"] - prefix_only["masked"])).interval()


def table(sides: dict[str, dict], bytes_per_token: float) -> str:
    """The two sides as a Markdown table."""
    rows = [[name, *(figure(sides[side], bytes_per_token) for side in COMMANDS)] for name, figure in ROWS.items()]
    return markdown_table([["nats per token", *COMMANDS], *rows])


def _with_error(interval: "Interval") -> str:
    return f"{interval.mean:z.4f} ± {interval.half_width:.4f}"


def write(folder: Path, report: dict, sides: dict[str, dict]) -> None:
    """Writes control.json, control.md and control.png, and prints the table."""
    from tril.model.atomic_files import write_json, write_text
    from tril.model.causality.mask_control import page, plot

    shown = table(sides, report["bytes_per_token"])
    numbers, length = report["windows"]["numbers"], report["windows"]["length"]
    remark = (
        f"Seed {report['seed']}, {report['steps']:,} steps each. The losses with ± and the bits per byte are over the "
        f"same {len(numbers)} windows of {length} tokens of the validation part. ± is half of the 95 % interval over "
        f"{report['observations']['described']}."
    )
    if (limit := report["limit_val_batches"]) is not None:
        remark += f" The validation losses that the runs logged are those with trainer.limit_val_batches={limit}."
    write_json(folder / "control.json", json.loads(json.dumps(report | sides, default=asdict)))
    write_text(folder / "control.md", page(sides, shown, remark))
    plot(folder / "control.png", sides, report["uniform_guess"])
    print(f"{shown}\n\n{remark}\n\n{folder}: control.json, control.md, control.png", flush=True)


if __name__ == "__main__":
    main()
