"""Times a model on this machine:  python scripts/bench.py what=[train,outside] model=small

Everything that train.py can train can be timed. The tables go to stdout; bench.md, bench.json (with the values of every
repetition) and bench.png go to a folder.

  python scripts/bench.py                                    everything, with the default model
  python scripts/bench.py what=[train,outside] model=small   the speed of training, and what Lightning costs
  python scripts/bench.py what=train vs="python train.py --device=cpu" vs_dir=FOLDER   compared with another program
"""

import importlib
import os
import shlex
import sys
import tempfile
from datetime import datetime
from pathlib import Path

from tril.scripts.benchmarks.bench_config import KEYS, PARTS, TEXTS, parse
from tril.scripts.benchmarks.section import Bench, Section
from tril.scripts.cli.config import RunConfig
from tril.scripts.cli.entry import entry
from tril.scripts.cli.errors import program, user_errors, writable
from tril.scripts.cli.typed import Typed

COMMAND = f"{program()} {shlex.join(sys.argv[1:])}".rstrip()  # as typed; Hydra's quotes are added later


@entry("bench", TEXTS)
def main(cfg: dict, typed: Typed) -> None:
    benchmark(cfg, typed.without(*KEYS))


def benchmark(cfg: dict, typed: Typed) -> None:
    """Runs all parts that `what` names.

    Args:
        cfg: configs/bench.yaml, composed.
        typed: of the settings that train.py has.

    Raises:
        UserError: wrong settings, or a program that cannot be started or fails.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None  # read before the benchmark adds to it
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        with user_errors():
            config = parse(cfg)
            settings = {key: value for key, value in cfg.items() if key not in KEYS}
            run_config = RunConfig.of(settings, typed).with_likely_vocabulary().on_this_machine()
            out = writable(config.out or f"outputs/bench/{datetime.now():%Y-%m-%d-%H-%M-%S}", "out")
        try:
            run(Bench(config, run_config, cfg, [each.typed for each in typed], Path(folder)), out, load)
        finally:
            if not any(out.iterdir()):
                out.rmdir()


def run(bench: Bench, out: Path, load: float | None) -> None:
    """Runs one part after another. Each table is written to disk before the next one is measured."""
    from tril.model.training.hardware import configure_torch
    from tril.scripts.benchmarks import output
    from tril.scripts.benchmarks.machine import describe

    configure_torch(bench.device)
    about = describe(bench.hardware, load) | {"command": COMMAND}
    print(output.heading(about), flush=True)
    sections: list[Section] = []
    for name in bench.config.what:
        module, function = PARTS[name]
        for section in getattr(importlib.import_module(f"tril.scripts.benchmarks.{module}"), function)(bench):
            print(f"\n{output.text(section)}", flush=True)
            sections.append(section)
            output.write(out, about, bench.cfg, sections)
    files = ["bench.md", "bench.json"] + ["bench.png"] * output.plot(out / "bench.png", about, sections)
    print(f"\n{out}: {', '.join(files)}", flush=True)


if __name__ == "__main__":
    main()
