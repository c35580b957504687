"""What the causal mask is for, measured:  python scripts/control.py masked=outputs/DATE/TIME unmasked=outputs/DATE/TIME

Takes a run with the mask and the same run without it, and shows what each claims, and what each can do when it sees the prefix alone.
All keys: configs/control.yaml. The table goes to stdout; control.json, control.md and control.png say the rest.
"""

import json
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path

from tril.model.runs import find_checkpoint, run_folder
from tril.scripts.common.cli import entry, plain, user_errors, writable
from tril.scripts.common.finished_run import Run, read_run, spread, validation_tokens

COMMANDS = {"masked": "python train.py", "unmasked": "python train.py experiment=control_no_mask"}
TEXTS = (*COMMANDS, "out")  # keys whose value is text as it was typed
SAME = ("seed", "model", "optim", "trainer")  # settings in which the two runs may not differ, but for the mask


@entry("control", TEXTS)
def main(cfg) -> None:
    cfg = plain(cfg)
    with user_errors():
        check(cfg)
        paths = {name: find(cfg, name) for name in COMMANDS}
    from tril.model.causality.mask_control import (
        read_curves,  # importing torch takes a second: what is wrong above is said at once
    )
    from tril.model.checkpoint import load

    with user_errors():
        runs = {name: read_run(path) for name, path in paths.items()}
        check_pair(runs)
        curves = {name: read_curves(run_folder(path)) for name, path in paths.items()}
        windows = spread(
            validation_tokens(runs["masked"]), cfg["windows"], runs["masked"].ours["config"]["context_length"]
        )
        models = {name: load(path) for name, path in paths.items()}
        sampling = {key: cfg[key] for key in ("max_new_tokens", "temperature", "seed")}
        texts = {
            name: list(zip(cfg["prompts"], lm.generate(cfg["prompts"], **sampling))) for name, lm in models.items()
        }
        folder = writable(cfg["out"] or run_folder(paths["unmasked"]) / "control", "out")
    report = describe(runs["masked"], windows, sampling)
    sides = {
        name: {
            "checkpoint": os.path.relpath(path),
            "parameters": models[name].model.n_parameters(),
            "curves": curves[name],
            "samples": texts[name],
        }
        for name, path in paths.items()
    }
    report["honest_unmasked_minus_masked"] = measure(models, windows, sides)
    write(folder, report, sides)


def check(cfg: dict) -> None:
    """Raises ValueError for values that no runs could make right; `lm.generate` checks its own."""
    windows, prompts = cfg["windows"], cfg["prompts"]
    if not isinstance(windows, int) or windows < 2:
        raise ValueError(f"windows={windows} must be a whole number, at least 2: a standard error needs two")
    if not isinstance(prompts, list) or not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError(f'prompts={prompts} must be a list of texts, such as \'["def ", "import "]\'')


def find(cfg: dict, name: str) -> Path:
    """The newest checkpoint of a run, not the best: the leaking run's best is one by its false loss."""
    if cfg[name] is None:
        raise ValueError(f"{name} is missing; give the folder of a run of `{COMMANDS[name]}`: {name}=outputs/DATE/TIME")
    return find_checkpoint(str(cfg[name]), prefer=("last",))


def check_pair(runs: dict[str, Run]) -> None:
    """Raises ValueError unless the two runs differ in the mask and in nothing else that changes their losses."""
    masked, unmasked = runs["masked"], runs["unmasked"]
    for name, causal in (("masked", True), ("unmasked", False)):
        if runs[name].ours["config"]["causal"] != causal:
            raise ValueError(
                f"{name}={runs[name].checkpoint} has model.causal={not causal}; give a run of `{COMMANDS[name]}`"
            )
    prints = [str(run.ours["data"].get("fingerprint"))[:12] for run in (masked, unmasked)]
    if prints[0] != prints[1] or masked.ours["tokenizer"] != unmasked.ours["tokenizer"]:
        raise ValueError(
            f"the runs have other data or tokenizers (fingerprints {' and '.join(prints)}); train both on the same text"
        )
    mine, its = comparable(masked), comparable(unmasked)
    differ = [
        f"{key}={mine.get(key)} and {its.get(key)}"
        for key in sorted(mine.keys() | its.keys())
        if mine.get(key) != its.get(key)
    ]
    if differ:
        raise ValueError(
            f"the runs differ in more than the mask ({', '.join(differ)}); train both with the same settings"
        )
    if masked.settings["data"].get("document_mask"):
        raise ValueError(
            "data.document_mask=true: the control gives a model its whole window; train both with data.document_mask=false"
        )


def comparable(run: Run) -> dict[str, object]:
    """What must be the same in both runs, by dotted names."""
    data = {key: run.settings["data"].get(key) for key in ("batch_size", "document_mask")}
    values = flat({key: run.settings[key] for key in SAME} | {"data": data, "steps done": run.steps})
    return {key: value for key, value in values.items() if key != "model.causal"}


def flat(values: dict, prefix: str = "") -> dict[str, object]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    found = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def describe(run: Run, windows, sampling: dict) -> dict:
    """How the figures come about, and what is the same for both sides."""
    from tril.data.prepare import val_bytes_per_token

    meta, (numbers, ids, _) = run.ours["data"], windows
    return {
        "seed": run.settings["seed"],
        "steps": run.steps,
        "data_fingerprint": meta["fingerprint"],
        "windows": {"of": "the validation part", "length": ids.shape[1], "numbers": numbers.tolist()},
        "losses": "nats per token: mean and standard error over windows, computed in float32 on the CPU",
        "sampling": sampling,
        "uniform_guess": math.log(meta["vocab_size"]),
        "bytes_per_token": val_bytes_per_token(meta),
    }


def measure(models: dict, windows, sides: dict[str, dict]):
    """Fills in the losses of both sides; returns the honest loss that the unmasked model has above the masked one's."""
    from tril.model.causality.prefix_loss import one_pass_nll, over_windows, prefix_only_nll

    honest, (_, ids, targets) = {}, windows
    for name, lm in models.items():
        print(
            f"{name}: {len(ids)} windows, each of their {ids.shape[1]} prefixes by itself", file=sys.stderr, flush=True
        )
        claimed, honest[name] = one_pass_nll(lm.model, ids, targets), prefix_only_nll(lm.model, ids, targets)
        losses = {"one_pass": claimed, "honest": honest[name], "gap": honest[name] - claimed}  # (windows, T) each
        sides[name] |= {key: over_windows(nll) for key, nll in losses.items()}
    return over_windows(honest["unmasked"] - honest["masked"])


def write(folder: Path, report: dict, sides: dict[str, dict]) -> None:
    """control.json, control.md and control.png, and the table to stdout."""
    from tril.model.causality.mask_control import page, plot, table

    shown = table(sides, report["bytes_per_token"])
    numbers, length = report["windows"]["numbers"], report["windows"]["length"]
    remark = (
        f"Seed {report['seed']}, {report['steps']:,} steps each. The losses with a standard error, and the bits per byte, are over "
        f"the same {len(numbers)} windows of {length} tokens of the validation part."
    )
    (folder / "control.json").write_text(json.dumps(report | sides, indent=2, default=asdict) + "\n", encoding="utf-8")
    (folder / "control.md").write_text(page(sides, shown, remark), encoding="utf-8")
    plot(folder / "control.png", sides, report["uniform_guess"])
    print(f"{shown}\n\n{folder}: control.json, control.md, control.png", flush=True)


if __name__ == "__main__":
    main()
