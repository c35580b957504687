"""The steps of a run whose whole training costs as many FLOPs as that of a base run.

`equal_flops` in the settings, as in configs/ablation/equal_flops.yaml, holds what the base run's model has in place of
this one's: {dim: 192}. trainer.max_steps and trainer.val_check_interval are those of the base run; the run gets steps
in inverse proportion to its FLOPs per token, and as many validations.
"""

import copy
import math
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from tril.scripts.common.cli import build
from tril.scripts.common.run_config import RunConfig, check_config, choose_vocab_size

if TYPE_CHECKING:
    from tril.model.config import GPTConfig

KEY = "equal_flops"
TOLERANCE = 0.02  # of the base run's training FLOPs


def with_equal_flops(cfg: DictConfig, config: RunConfig) -> tuple[DictConfig, RunConfig]:
    """The settings with the steps of this run; unchanged without `equal_flops`.

    The FLOPs depend on the vocabulary, so the text is prepared, unless model.vocab_size is set.

    Raises:
        ValueError: no number of steps is within TOLERANCE, or the base model is invalid.
        OSError: the text cannot be read.
    """
    base = OmegaConf.select(cfg, KEY)
    if base is None:
        return cfg, config
    if not isinstance(base, DictConfig) or not base:
        raise ValueError(f"{KEY}={base} must have the settings of the base run's model, such as {KEY}.dim=192")
    steps, interval = solve(config, dict(base), vocabulary(cfg, config))
    cfg = copy.deepcopy(cfg)
    cfg.trainer.max_steps, cfg.trainer.val_check_interval = steps, interval
    return cfg, check_config(cfg, elsewhere=config.hardware is None)


def solve(config: RunConfig, base: dict, vocab_size: int) -> tuple[int, int]:
    """Steps of the run, and steps between two of its validations.

    Args:
        config: the run, with steps and validations of the base run.
        base: fields of GPTConfig, which the base run's model has in place of the run's.
        vocab_size: of both models.
    """
    from tril.model.config import GPTConfig

    interval = config.trainer.val_check_interval
    own = config.model.to_dict() | {"vocab_size": vocab_size}
    ratio = step_flops(build(GPTConfig, own | base, KEY)) / step_flops(build(GPTConfig, own, "model"))
    if ratio == 1:
        return config.steps, interval
    exact = config.steps * ratio
    steps = max(1, round(exact))
    if (error := abs(steps / exact - 1)) > TOLERANCE:
        least = math.ceil(0.5 / TOLERANCE / ratio)  # half a step is then at most TOLERANCE of the run
        left = f"leave {exact:.1f} steps at model.dim={config.model.dim}, and {steps} are {error:.1%} off"
        remedy = f"(limit {TOLERANCE:.0%}); use trainer.max_steps={least} or more"
        raise ValueError(f"trainer.max_steps={config.steps} of the base run {left} {remedy}")
    validations = math.ceil(config.steps / interval)  # the last one is at the end
    return steps, math.ceil(steps / validations)


def step_flops(model: "GPTConfig") -> int:
    """FLOPs of the tokens of one window; every step of both runs has the same number of windows."""
    import torch

    from tril.model.gpt import GPT

    with torch.device("meta"):
        return GPT(model).flops_per_token() * model.context_length


def vocabulary(cfg: DictConfig, config: RunConfig) -> int:
    """Rows of the embedding, which are known once the text is prepared."""
    if cfg.model.vocab_size is not None:
        return cfg.model.vocab_size
    return choose_vocab_size(None, config.data.prepare().meta["vocab_size"])
