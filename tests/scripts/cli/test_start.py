"""A run that goes on: what may not differ from its checkpoint, what may, and that its folder stays its own."""

from functools import reduce

import yaml

from tests.contract.harness import run
from tests.runs import TINY
from tril.model.checkpoint import Checkpoint, read_state, write_state

SHORT = ("trainer.max_steps=2", "trainer.val_check_interval=2", "~callbacks.causality", "~callbacks.samples")
EDITS = {"data.batch_size": 2, "data.document_mask": True}  # they change the result; the contract has others
EDITS |= {"trainer.precision": "bf16-mixed", "causality.allow_leak": True}
EDITS |= {"callbacks.early_stop": {"patience": 1, "min_passes": 0.0}}
FREE = {"checkpoint.every_n_steps": 1, "trainer.log_every_n_steps": 1, "data.val_batch_size": 2}
FREE |= {"callbacks.samples": {"prompt": "line"}, "callbacks.heads": {}}


def edit(folder, key, value):
    path = folder / "run" / "config.yaml"
    content = yaml.safe_load(path.read_text("utf-8"))
    *groups, name = key.split(".")
    reduce(dict.__getitem__, groups, content)[name] = value
    path.write_text(yaml.safe_dump(content), "utf-8")


def test_a_run_goes_on_in_its_folder_with_what_is_typed_and_is_not_started_over(text):
    folder, new = text.parent, (*TINY, *SHORT, "~callbacks.heads", "data.path=text.txt")
    done = run("train", *new, "hydra.run.dir=run", cwd=folder).succeeded()
    (folder / "killed").mkdir()
    (folder / "killed" / "config.yaml").touch()  # before its first checkpoint
    config, before = folder / "run" / "config.yaml", (folder / "run" / "summary.json").read_bytes()
    for arguments, message in (
        ((*new, "hydra.run.dir=run"), "hydra.run.dir=run has a run; continue it with resume=run"),
        ((*new, "hydra.run.dir=killed"), "has a run; it has no checkpoint, so remove it, or choose another folder"),
        ((*new, "hydra.run.dir="), "hydra.run.dir='' is no folder; name one, or leave it out"),
        (("resume=run", "optim.lr=0.5"), "finished its 2 steps without optim.lr"),
        (("resume=run", "+optim.x=1"), "there is no setting optim.x"),
        (("resume=run", "trainer.max_steps=3", "hydra.run.dir=more"), "hydra.run.dir=more cannot be combined with"),
    ):
        run("train", *arguments, cwd=folder).refused(message)
    done = run("train", "resume=run", cwd=folder)
    assert done.returncode == 0 and "has finished its 2 steps; it is unchanged" in done.stdout
    assert (folder / "run" / "summary.json").read_bytes() == before

    for key, value in FREE.items():
        edit(folder, key, value)
    saved, files = config.read_text(), sorted((folder / "run").rglob("*"))
    for key, value in EDITS.items():
        edit(folder, key, value)
        run("train", "resume=run", "trainer.max_steps=3", cwd=folder).refused(key, "to change it, add")
        config.write_text(saved)
    assert sorted((folder / "run").rglob("*")) == files
    edit(folder, "optim.lr", 0.5)
    path = folder / "run" / "checkpoints" / "last.ckpt"
    state = read_state(path)
    state["tril"] |= {"code": "0" * 64, "torch_version": "1.0.0"}
    write_state(path, state)
    done = run("train", "resume=run", "trainer.max_steps=3", "optim.lr=0.25", cwd=folder).succeeded()
    checkpoint = Checkpoint.read(path)
    assert (checkpoint.step, checkpoint.settings["optim.lr"], checkpoint.settings["trainer.max_steps"]) == (3, 0.25, 3)
    assert "torch is 2" in done.stderr and "was 1.0" in done.stderr and "0" * 12 in done.stderr
