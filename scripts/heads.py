"""What the heads of a trained model do, and how the loss changes without them:  tril heads ckpt=latest

Removes every head alone and then one after another, scores what each attends to, and draws the attention maps of a
text. The table goes to stdout; heads.csv, removal.csv, heads.png and the page attention.html go to a folder.

All of that describes one trained model. For a configuration, name a sweep with several seeds:  tril heads
dir=multirun/NAME  removes the heads of each run and averages over seeds what is comparable.
"""

from pydantic.dataclasses import dataclass

from tril.data.settings import setting, strict_settings
from tril.model.generation.config import CKPT, DEVICE
from tril.model.runs import find_checkpoint, find_sweep
from tril.scripts.cli.app import Composed, command
from tril.scripts.cli.errors import user_errors


@dataclass(frozen=True, config=strict_settings())
class HeadsCommand:
    """The heads of one model, or of all runs of a sweep."""

    ckpt: str = setting("latest", str(CKPT.description), needs="dir=null")
    dir: str | None = setting(None, "instead of ckpt, all runs of a sweep: its folder, latest, or a folder of runs")
    prompt: str | None = setting(
        None,
        r"a text for attention maps; \n is a line end; null: the start of the validation part; empty: end of text",
        escapes=True,
        needs="dir=null",
    )
    # a confidence interval needs two
    windows: int = setting(24, "of the validation part, evenly spaced; more give narrower intervals", ge=2)
    out: str | None = setting(
        None, "folder for tables, figures and the page; null: heads/ in the folder of the run or the sweep"
    )
    device: str = DEVICE
    seed: int = setting(0, "seed of the repeated random sequences", needs="dir=null", ge=0, lt=2**63)


@command("heads", HeadsCommand)
def main(settings: HeadsCommand, composed: Composed) -> None:
    with user_errors():  # before torch, which takes a second to import
        path = find_checkpoint(settings.ckpt) if settings.dir is None else find_sweep(settings.dir)
    from tril.scripts.experiments.trained_heads import describe_model, describe_sweep

    if settings.dir is not None:
        describe_sweep(path, settings.windows, settings.out, settings.device)
    else:
        describe_model(path, settings.windows, settings.prompt, settings.seed, settings.out, settings.device)


if __name__ == "__main__":
    main()
