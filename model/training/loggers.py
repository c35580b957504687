"""wandb without surprises: no account, no question."""

import netrc
import os
from urllib.parse import urlsplit


def no_logger() -> bool:
    """logger=none: Lightning's word for it is False (None would be its default logger)."""
    return False


def wandb_logger(**arguments):
    """lightning's WandbLogger; without an account the run is kept on disk, for `wandb sync` to upload later."""
    from lightning.pytorch.loggers import WandbLogger

    if "WANDB_MODE" not in os.environ and not has_wandb_account():
        os.environ["WANDB_MODE"] = "offline"
    return WandbLogger(**arguments)


def has_wandb_account() -> bool:
    """Whether a key is where `wandb login` puts it; asking wandb itself could end in a prompt."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
