"""What the heads of a trained model do, and how the loss changes without them:  python scripts/heads.py ckpt=latest

Removes every head alone and then one after another, scores what each attends to, and draws the attention maps of a
text. The table goes to stdout. heads.csv, removal.csv, heads.json, heads.png, removal.png, attention.png and the page
attention.html go to a folder.

All of that describes one trained model. For a configuration, name a sweep with several seeds:  python scripts/heads.py
dir=multirun/DATE/TIME  removes the heads of each run and averages over seeds what is comparable. heads.csv,
averages.csv and ranks.png go to a folder.
"""

import warnings

from pydantic.dataclasses import dataclass

from tril.data.settings import setting, strict_settings
from tril.model.runs import find_checkpoint, find_sweep
from tril.scripts.cli.command_line import CommandLine, Program
from tril.scripts.cli.entry import entry
from tril.scripts.cli.errors import pick_device, user_errors

NEWEST = "latest"  # the default of ckpt


@dataclass(frozen=True, config=strict_settings())
class HeadsCommand:
    """The heads of one model, or of all runs of a sweep."""

    ckpt: str = setting(
        NEWEST, "a checkpoint file, a run folder, or latest: the newest run below outputs/ and multirun/"
    )
    dir: str | None = setting(
        None,
        "instead of ckpt, all runs of a sweep: its folder, latest (the newest below multirun/), or a folder of runs",
    )
    prompt: str | None = setting(
        None,
        "with ckpt: a text to draw attention maps of; null: the start of the validation part; empty: end-of-text alone",
    )
    windows: int = setting(
        24, "evenly spaced windows of the validation part, to measure on: more give narrower intervals", ge=2
    )  # a confidence interval needs two
    out: str | None = setting(
        None, "folder for tables, figures and the page; null: heads/ in the folder of the run or the sweep"
    )
    device: str = setting("auto", "auto | cpu | cuda | mps")
    seed: int = setting(0, "with ckpt: seed of the repeated random sequences", ge=0, lt=2**63)

    def __post_init__(self) -> None:
        given = [f"ckpt={self.ckpt}"] * (self.ckpt != NEWEST) + [f"prompt={self.prompt}"] * (self.prompt is not None)
        if self.dir is not None and given:
            raise ValueError(f"{given[0]} is for one model, dir={self.dir} for all of a sweep; give one of them")


@entry(Program("heads", HeadsCommand))
def main(line: CommandLine[HeadsCommand]) -> None:
    settings = line.own
    with user_errors():  # before torch, which takes a second to import
        path = find_checkpoint(settings.ckpt) if settings.dir is None else find_sweep(settings.dir)
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    from tril.model.training.hardware import keep_freed_memory
    from tril.scripts.experiments.trained_heads import describe_model, describe_sweep

    with user_errors():
        device = pick_device(settings.device)
    if device == "cpu":
        keep_freed_memory()
    if settings.dir is not None:
        describe_sweep(path, settings.windows, settings.out, device)
    else:
        describe_model(path, settings.windows, settings.prompt, settings.seed, settings.out, device)


if __name__ == "__main__":
    main()
