"""The loggers of configs/logger: none, and wandb that works without an account."""

import netrc
import os
from urllib.parse import urlsplit


def no_logger() -> bool:
    """logger=none: Lightning takes False (None would mean its default logger)."""
    return False


def wandb_logger(**arguments):
    """Lightning's WandbLogger; without an account the run stays on disk, and `wandb sync` uploads it later."""
    from lightning.pytorch.loggers import WandbLogger

    if "WANDB_MODE" not in os.environ and not has_wandb_account():
        os.environ["WANDB_MODE"] = "offline"
    return WandbLogger(**arguments)


def has_wandb_account() -> bool:
    """Whether a key is set or stored by `wandb login`; wandb's own check can prompt the user."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
