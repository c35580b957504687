"""A run folder from somebody else is data: opening it sends nothing, and writes nothing outside of it."""

import shlex
import shutil
import socket
from functools import reduce
from pathlib import Path

import pytest
import yaml
from filelock import FileLock

from tests.contract.harness import assert_refused, run, summary, table

FOREIGN = {key: yaml.safe_load(value) for key, value in table("foreign_settings.txt", columns=2)}
BOMB = "\n".join(["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 25)])
DAMAGED = {"brackets": "[" * 3000, "recursion": "a: &a [*a]", "bomb": BOMB, "unclosed": "a: [1", "bytes": "\x00\xff"}
OPEN = {"train": "resume", "heads": "ckpt", "evaluate": "ckpt", "report": "dir"}  # the key that names the folder
STEPS = ("trainer.max_steps=10", "~callbacks.causality")  # two more


@pytest.fixture
def url():
    """Of a server on this computer to which no command may connect."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.fixture
def folder(trained, tmp_path):
    """A copy of a run, beside the folder `outside`."""
    (tmp_path / "outside").mkdir()
    return Path(shutil.copytree(trained, tmp_path / "run"))


def edit(folder, place, value, url=""):
    """Puts a value at a dotted key of the saved settings."""
    content = yaml.safe_load((folder / "config.yaml").read_text("utf-8"))
    *groups, name = place.split(".")
    reduce(dict.__getitem__, groups, content)[name] = value
    text = yaml.safe_dump(content).replace("RUN", str(folder)).replace("URL", url)
    (folder / "config.yaml").write_text(text.replace("OUT", str(folder.parent / "outside")), "utf-8")


def assert_closed(command, folder, *parts):
    """The command refuses to open the folder in one line with these parts, and changes no file."""

    def files():
        return {(path, path.is_file() and not path.is_symlink() and path.read_bytes()) for path in place.rglob("*")}

    place, steps = folder.parent, STEPS if command == "train" else ()
    before = files()
    done = run(command, f"{OPEN[command]}={folder}", *steps, cwd=place, WANDB_API_KEY="a" * 40)
    assert {path for path, _ in files() ^ before} == set()
    assert_refused(done, *parts)


@pytest.mark.parametrize("at", ["heads data", "evaluate data", *(f"train {key}" for key in FOREIGN)])
def test_a_saved_setting_that_could_send_or_write_elsewhere_is_not_used(folder, url, at):
    command, place = at.split()
    edit(folder, place, FOREIGN[place], url)
    assert_closed(command, folder, f"the saved {place}", "; ")


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_settings_are_named_in_one_line(folder, damage):
    (folder / "config.yaml").write_bytes(DAMAGED[damage].encode("latin-1"))
    for command in OPEN:
        assert_closed(command, folder, "config.yaml")


@pytest.mark.parametrize("name", ["samples.txt", ".run.lock", "loss.png", "csv", "checkpoints", "config.yaml", "new/x"])
def test_a_folder_with_links_to_places_outside_of_it_is_refused(folder, name):
    link, place = folder / name, folder.parent / "outside" / "place"
    if link.exists():
        link.rename(place)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(place)
    assert_closed("train", folder, f"{link} is a link to {place}", "remove it")


def test_a_run_that_a_process_trains_is_not_trained_by_another(folder):
    with FileLock(folder / ".run.lock"):
        done = run("train", f"resume={folder}", *STEPS, cwd=folder.parent)
    assert_refused(done, "another process", f"{folder}")


def test_a_run_goes_on_with_its_own_settings_and_with_what_is_typed_again(folder):
    cache = folder.parent / "outside" / "my cache"
    (folder / "latest").symlink_to("checkpoints/last.ckpt")
    edit(folder, "data.cache_dir", str(cache))
    done = run("train", f"resume={folder}", *STEPS, cwd=folder.parent)
    typed = shlex.split(done.err.partition("if you trust it, type ")[2])
    assert len(typed) == 1 and not cache.exists()
    run("train", f"resume={folder}", *STEPS, *typed, cwd=folder.parent).succeeded()
    assert summary(folder)["steps"] == 10 and any(cache.iterdir())
