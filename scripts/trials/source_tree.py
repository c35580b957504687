"""The code of the arms: a copy of this package that `python FOLDER ...` trains with.

An arm is trained by a copy, so that files which change while the referee runs do not change its later runs.
"""

import hashlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]
PARTS = ("model", "data", "scripts", "configs", "train.py")  # what a run needs
SOURCES = (".py", ".yaml")
# `python FOLDER` runs the __main__.py of the folder and finds `tril` there, before any installed one.
MAIN = 'from tril.train import main\n\nif __name__ == "__main__":\n    main()\n'


@dataclass(frozen=True)
class SourceTree:
    """A folder that holds the package `tril`.

    Attributes:
        digest: a hash of its sources and configs, the same for equal code.
        commit: full hash; None outside of git, with "+" if the files differ from it.
    """

    folder: Path
    digest: str
    commit: str | None


def copy_package(root: Path) -> SourceTree:
    """A copy of the running package below `root`."""
    from tril.model.training.summary import code_version

    digest, commit = digest_of(PACKAGE), code_version(PACKAGE)
    if (folder := _folder(root, digest)).is_dir():
        return SourceTree(folder, digest, commit)
    with tempfile.TemporaryDirectory(dir=_created(root), prefix=".code-") as temporary:
        package = Path(temporary, "tree", "tril")
        package.mkdir(parents=True)
        for part in PARTS:
            if (PACKAGE / part).is_dir():
                shutil.copytree(PACKAGE / part, package / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(PACKAGE / part, package / part)
        return _keep(root, package, commit)


def _created(root: Path) -> Path:
    (root / "code").mkdir(parents=True, exist_ok=True)
    return root / "code"


def _folder(root: Path, digest: str) -> Path:
    return root / "code" / digest[:12]


def _keep(root: Path, package: Path, commit: str | None) -> SourceTree:
    """Moves the tree of a complete package to a folder that its digest names, unless that exists."""
    digest = digest_of(package)
    tree, folder = package.parent, _folder(root, digest)
    (tree / "__main__.py").write_text(MAIN)
    try:
        os.replace(tree, folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster
            raise
    return SourceTree(folder, digest, commit)


def digest_of(package: Path) -> str:
    """Hash of the names and contents of all sources and configs that a run can import or compose."""
    found = [path for part in PARTS for path in (package / part).rglob("*") if path.suffix in SOURCES]
    digest = hashlib.sha256()
    for path in sorted([*found, package / "train.py"]):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
