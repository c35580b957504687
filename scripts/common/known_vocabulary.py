"""The settings of a run whose text is not prepared, for commands that only measure or calculate."""

from dataclasses import replace

from omegaconf import DictConfig

from tril.scripts.common.run_config import RunConfig, check_config

CHARACTERS = 65 + 2  # of tiny shakespeare, and the tokens for end-of-text and unknown characters


def parse_run(cfg: DictConfig) -> RunConfig:
    """The checked settings of train.py, with the vocabulary size that the tokenizer will have if none is chosen."""
    config = check_config(cfg)
    if cfg.model.vocab_size is not None:
        return config
    tokenizer = config.data.tokenizer
    if tokenizer.kind == "hub":
        raise ValueError("model.vocab_size=null needs a local tokenizer; set it, as in model.vocab_size=50304")
    from tril.data.tokenizer import AUTO_VOCAB_SIZE, build, n_ids

    sizes = {"bpe": tokenizer.vocab_size or AUTO_VOCAB_SIZE, "char": CHARACTERS}
    size = sizes.get(tokenizer.kind) or n_ids(build(tokenizer, ()))
    return replace(config, model=replace(config.model, vocab_size=size))
