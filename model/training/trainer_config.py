"""The former place of some settings."""

from tril.model.training.settings import CausalityConfig, CheckpointConfig, SweepConfig, TopLevelConfig, TrainerConfig

__all__ = ["CausalityConfig", "CheckpointConfig", "SweepConfig", "TopLevelConfig", "TrainerConfig"]
