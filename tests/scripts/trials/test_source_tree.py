"""Copies of the code."""

import subprocess

import pytest

from tests.conftest import run_python
from tril.scripts.trials import source_tree
from tril.scripts.trials.source_tree import copy_package, digest_of


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A git checkout of a package with the parts of this one, whose train.py prints its arguments."""
    folder = tmp_path / "checkout"
    for part in ("model", "data", "scripts", "configs"):
        (folder / part).mkdir(parents=True)
        (folder / part / "__init__.py").write_text(f"NAME = {part!r}\n")
    (folder / "train.py").write_text(
        "import sys\nimport tril.model\ndef main():\n    print(tril.model.__file__, sys.argv[1:])\n"
    )
    git(tmp_path, "init", "--quiet", str(folder))
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "first")
    monkeypatch.setattr(source_tree, "PACKAGE", folder.resolve())
    return folder


def test_copy_of_this_package_has_all_code_and_configs(tmp_path):
    tree = copy_package(tmp_path)
    copied, package = tree.folder / "tril", source_tree.PACKAGE
    assert tree.folder.name == tree.digest[:12]
    for path in ("train.py", "configs/model/nano.yaml", "scripts/experiments/page.html", "model/heads/page.py"):
        assert (copied / path).read_bytes() == (package / path).read_bytes()
    assert digest_of(copied) == digest_of(package) == tree.digest
    assert not list(copied.rglob("__pycache__"))
    assert copy_package(tmp_path).folder == tree.folder
    assert [path.name for path in (tmp_path / "code").iterdir()] == [tree.folder.name]  # no temporary folder


def test_a_copy_trains_with_its_own_code(package, tmp_path):
    first = copy_package(tmp_path)
    (package / "model" / "__init__.py").write_text("NAME = 'changed'\n")
    now = copy_package(tmp_path)
    assert now.commit == f"{git(package, 'rev-parse', 'HEAD')[:12]}+" and first.digest != now.digest
    assert (first.folder / "tril" / "model" / "__init__.py").read_text() == "NAME = 'model'\n"
    done = run_python(first.folder, "a=1", cwd=tmp_path)  # an installed tril is not used
    assert done.stdout == f"{first.folder / 'tril' / 'model' / '__init__.py'} ['a=1']\n", done.stderr
    git(package, "checkout", "--quiet", ".")
    assert copy_package(tmp_path).digest == first.digest  # equal code shares its runs
