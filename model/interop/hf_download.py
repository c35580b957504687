"""Models of the Hugging Face hub: their files, downloaded into the cache of `huggingface_hub`."""

import logging
import re
import sys
from pathlib import Path

NAME = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")
FILES = ["config.json", "model*.safetensors", "model.safetensors.index.json"]
FILES += ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]


def is_hub_name(name: str) -> bool:
    """Whether it is ORG/NAME or ORG/NAME@REVISION, and no folder on this disk."""
    return NAME.fullmatch(name) is not None and not Path(name).expanduser().exists()


def download(name: str) -> tuple[Path, str]:
    """The folder of a model of the hub, with what `read_hf` needs, and its name with the commit: ORG/NAME@COMMIT.

    Files of an earlier download are not downloaded again, and without network they are used unchanged.

    Args:
        name: ORG/NAME, or ORG/NAME@REVISION with a branch, tag or commit.

    Raises:
        OSError: the hub cannot be reached, or does not know the model; one line.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    match = NAME.fullmatch(name)
    assert match is not None, name
    if not sys.stderr.isatty():
        disable_progress_bars()
    for client in ("httpx", "httpx2"):  # of huggingface_hub 1 and 2, which log a line for each request
        logging.getLogger(client).setLevel(logging.WARNING)
    try:
        folder = Path(snapshot_download(match["repository"], revision=match["revision"], allow_patterns=FILES))
    except Exception as error:  # network, server and library errors have no common base class
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        remedy = "check name, revision and network, set HF_ENDPOINT to a mirror, or name a folder on this disk"
        raise OSError(f"{name} is no folder, and cannot be read from the hub ({reason}); {remedy}") from error
    return folder, f"{match['repository']}@{folder.name}"  # the cache has a folder for each commit
