"""The figures, the sample and the pictures in README.md, all from one run of the default command.

  python -m tril.scripts.maintenance.readme        trains the default run: about five minutes on two free cores
  python -m tril.scripts.maintenance.readme RUN    takes the folder of a finished run, without its time

Both write docs/readme.json, docs/default_run.png and docs/play.png, and fill in README.md, the last of which
`cog -P -r README.md` does alone. They need a checkout with the test extra, and Chromium with its driver.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from datetime import date
from pathlib import Path
from typing import Any

from tril.model.atomic_files import write_json
from tril.model.runs import BEST, CHECKPOINTS, SUMMARY, Run, find_checkpoint, run_folder
from tril.scripts.cli.errors import fail

ROOT = Path(__file__).resolve().parents[2]
BUSY = 0.5  # load per core above which other processes disturb a time
RECORD, PICTURE, PAGE = "docs/readme.json", "docs/default_run.png", "docs/play.png"
MACHINE = ("device", "precision", "threads")
COPIED = ("final_val_bpb", "final_val_loss", "steps", "tokens", "parameters", "seed", "code", *MACHINE)
LINE = 140  # characters of a line of README.md
SAMPLE_LINES = 11  # what README.md shows of the sample


def main() -> None:
    """Entry point."""
    if len(sys.argv) > 2 or {"-h", "--help"} & set(sys.argv):
        return print(__doc__)
    with tempfile.TemporaryDirectory(prefix="readme-") as folder:
        try:
            if not (ROOT / RECORD).is_file():
                raise FileNotFoundError(f"{ROOT} has no {RECORD}; run this in a checkout of the repository")
            run, duration = (run_folder(find_checkpoint(sys.argv[1])), None) if sys.argv[1:] else trained(Path(folder))
            update(ROOT, run, duration)
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            fail(error)


def trained(folder: Path) -> tuple[Path, dict[str, Any] | None]:
    """Trains the default run below `folder`.

    Returns:
        The folder of the run, and its time; None if other processes used the cores as well.
    """
    run = folder / "outputs" / "default"  # its picture names it
    busy = os.getloadavg()[0] > BUSY * (os.cpu_count() or 1)
    train = [sys.executable, str(ROOT / "train.py")]
    subprocess.run([*train, "trainer.max_steps=1", f"hydra.run.dir={folder / 'prepare'}"], check=True)  # the text
    started = time.perf_counter()
    subprocess.run([*train, f"hydra.run.dir={run}"], check=True)
    seconds, summary = time.perf_counter() - started, read_json(run / SUMMARY)
    if busy or os.getloadavg()[0] > (summary["threads"] or 1) + BUSY:
        print("other processes used the cores, so README.md keeps the time that it has", file=sys.stderr)
        return run, None
    validated = sum("val/loss" in row for row in Run(run).metrics)  # each takes as long as tens of steps
    measured = {"seconds": round(seconds), "validations": validated, "date": str(date.today())}
    return run, measured | {k: summary[k] for k in MACHINE}


def update(root: Path, run: Path, duration: dict[str, Any] | None) -> None:
    """Writes the record and the pictures of a run, and README.md.

    Args:
        root: the checkout.
        run: the folder of a finished run.
        duration: the time of a run on free cores, as `trained` returns it; None keeps the one in the record.
    """
    summary, old = read_json(run / SUMMARY), read_json(root / RECORD)
    entries = {name: summary[name] for name in COPIED} | {
        "date": str(date.fromtimestamp((run / SUMMARY).stat().st_mtime))
    }
    command = [sys.executable, str(ROOT / "scripts" / "sample.py"), f"ckpt={run}", "prompt=def ", "seed=0"]
    text = subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout
    entries |= {"sample": text.splitlines()[:SAMPLE_LINES], "time": duration or old["time"]}
    write_json(root / RECORD, entries)
    shutil.copyfile(run / "loss.png", root / PICTURE)
    name = Path("outputs", run.name, CHECKPOINTS, BEST)  # as a user sees it
    page = ["-m", "tests.scripts.play_picture", str(run / CHECKPOINTS / BEST), str(name), str(root / PAGE)]
    subprocess.run([sys.executable, *page], check=True, cwd=ROOT)
    fill_in(root / "README.md")


def fill_in(page: Path) -> None:
    """Replaces what the markers of README.md compute."""
    from cogapp import Cog

    assert Cog().main(["cog", "-P", "-r", str(page)]) == 0


def figures(root: Path = ROOT) -> str:
    """The generated part of README.md: the results of the run, and the beginning of its sample."""
    run = read_json(root / RECORD)
    took = run["time"]
    minutes, seconds = divmod(took["seconds"], 60)
    text = (
        f"The run in the picture reached {run['final_val_bpb']:.3f} bits per byte, {run['final_val_loss']:.3f} nats "
        f"per token, on files that it had not seen ({machine(run)}, {run['date']}). A run takes {minutes} minutes "
        f"{seconds} seconds with {took['validations']} validations, once the text is prepared ({machine(took)}, "
        f"{took['date']}); other seeds and machines: "
        "[docs/results.md](docs/results.md). The sample begins:"
    )
    lines = textwrap.fill(text, LINE, break_on_hyphens=False)
    return f"{lines}\n\n```text\n{chr(10).join(run['sample'])}\n```"


def machine(entry: dict[str, Any]) -> str:
    """Where something ran, in words."""
    threads = entry["threads"]
    parts = [entry["device"].replace(" (cpu)", ""), f"{threads} thread{'s' * (threads > 1)}" if threads else ""]
    return ", ".join(filter(None, [*parts, {"32-true": "float32"}.get(entry["precision"], entry["precision"])]))


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
