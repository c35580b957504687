"""The steps of a run with trainer.max_flops, which depend on the vocabulary of its text."""

import copy

from omegaconf import DictConfig

from tril.scripts.common.run_config import RunConfig, check_config, choose_vocab_size


def with_max_flops(cfg: DictConfig, config: RunConfig) -> tuple[DictConfig, RunConfig]:
    """The settings with the steps of this run; unchanged without trainer.max_flops.

    The text is prepared, unless model.vocab_size is set.

    Raises:
        ValueError: no number of steps has so many FLOPs.
        OSError: the text cannot be read.
    """
    import dataclasses

    import torch

    from tril.model.gpt import GPT
    from tril.model.training.schedule import steps_for_flops

    trainer = config.trainer
    if trainer.max_flops is None:
        return cfg, config
    vocab_size = cfg.model.vocab_size or choose_vocab_size(None, config.data.prepare().meta["vocab_size"])
    with torch.device("meta"):
        flops = GPT(dataclasses.replace(config.model, vocab_size=vocab_size)).flops_per_token()
    flops_per_step = flops * config.tokens_per_step() * config.data_ranks
    steps, interval = steps_for_flops(
        trainer.max_flops, flops_per_step, max_steps=trainer.max_steps, val_check_interval=trainer.val_check_interval
    )
    cfg = copy.deepcopy(cfg)
    cfg.trainer.max_steps, cfg.trainer.val_check_interval, cfg.trainer.max_flops = steps, interval, None
    return cfg, check_config(cfg, elsewhere=config.hardware is None)
