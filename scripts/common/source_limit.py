"""The steps of a run with data.exhausted=stop: until a source of its mixture has been read once."""

import copy
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from tril.scripts.common.resume import Resumed
from tril.scripts.common.run_config import RunConfig, check_config

if TYPE_CHECKING:
    from tril.data.mixture import Mixture


def with_source_limit(
    cfg: DictConfig, config: RunConfig, resumed: Resumed | None = None
) -> tuple[DictConfig, RunConfig, str]:
    """The settings with fewer trainer.max_steps if a source would be read a second time; else unchanged.

    So the schedule, the last validation and the checkpoints are those of a run with these steps. The text is prepared.

    Args:
        resumed: the checkpoint that the run continues, whose steps may have had another size.

    Returns:
        The settings, and a line about the change, "" without one.

    Raises:
        ValueError: no step is left, or the schedule does not fit the steps.
        OSError: the text cannot be read.
    """
    from tril.data.mixture import Mixture

    source = config.data.source
    if not isinstance(source, Mixture) or source.exhausted == "repeat":
        return cfg, config, ""
    limit, name = _windows(config, source, cfg.seed)
    per_step = config.data.batch_size * config.accumulate * config.data_ranks
    done, consumed = (0, 0) if resumed is None else (resumed.step, _consumed(resumed))
    steps = done + max(0, limit - consumed) // per_step
    if steps >= config.steps:
        return cfg, config, ""
    if steps == 0:
        needs = f"a step takes {per_step} windows, and {name} has been read once after {limit}"
        raise ValueError(f"data.exhausted=stop leaves no step: {needs}; use data.exhausted=repeat")
    cfg = copy.deepcopy(cfg)
    cfg.trainer.max_steps = steps
    line = f"data.exhausted=stop: {name} has been read once after {steps:,} steps, which replace trainer.max_steps="
    return cfg, check_config(cfg, elsewhere=config.hardware is None), f"{line}{config.steps}"


def _windows(config: RunConfig, source: "Mixture", seed: int) -> tuple[int, str]:
    """The windows of the run before a source starts its second epoch, and the name of the source."""
    from tril.data.batches import TrainWindows

    tokens = [text.tokens("train") for text in config.data.prepare().texts.values()]
    counts = [member.count for member in source.members.values()]
    limit, number = TrainWindows(tokens, config.model.context_length, 1, seed, counts=counts).first_repeat()
    return limit, list(source.members)[number]


def _consumed(resumed: Resumed) -> int:
    """The training windows before the checkpoint, as the loader counts them."""
    [state] = resumed.content["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    return state["consumed"]
