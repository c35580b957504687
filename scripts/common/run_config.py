"""The settings of a run, checked before anything expensive begins, and how large the run is."""

from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from tril.scripts.common.cli import build, plain


@dataclass(frozen=True)
class Plan:
    """The checked settings."""

    model: "GPTConfig"  # noqa: F821
    optim: "OptimConfig"  # noqa: F821
    data: "DataConfig"  # noqa: F821
    hardware: "Hardware | None"  # noqa: F821
    steps: int
    accumulate: int  # micro-batches in a step

    def tokens_per_step(self) -> int:
        """Of one device."""
        return self.data.batch_size * self.model.context_length * self.accumulate


def check(cfg: DictConfig, *, elsewhere: bool = False) -> Plan:
    """Raises ValueError for wrong settings; imports torch, but not Lightning, and touches no data.

    elsewhere  the run is for another machine, so that this one's hardware says nothing: `hardware` is None
    """
    from tril.data.cache import keep_compiled_code
    from tril.data.config import parse
    from tril.model.backends import FLEX_SMALLEST_HEAD
    from tril.model.config import GPTConfig
    from tril.model.training.hardware import CUDA_GRAPHS, pick
    from tril.model.training.optim import OptimConfig
    from tril.model.training.schedule import ScheduleConfig, lr_factor

    keep_compiled_code()  # before `pick` looks for a compiler: torch chooses its folder then
    if not isinstance(cfg.seed, int) or not 0 <= cfg.seed < 2**64:  # what torch.Generator takes
        raise ValueError(f"seed={cfg.seed} must be a whole number from 0 to 2**64 - 1")
    for name in ("model", "data", "optim", "optim.schedule", "trainer", "callbacks", "causality"):
        if not isinstance(group := OmegaConf.select(cfg, name), DictConfig):
            raise ValueError(
                f"{name}={group} must be a group of settings; change single ones, such as {name}.KEY=VALUE"
            )
    model = plain(cfg.model)
    if model["vocab_size"] is None:
        model["vocab_size"] = 1
    optim = plain(cfg.optim)
    optim["schedule"] = build(ScheduleConfig, optim["schedule"], "optim.schedule")
    counts = {
        name: cfg.trainer[name]
        for name in ("max_steps", "val_check_interval", "accumulate_grad_batches", "log_every_n_steps")
    }
    plan = Plan(
        build(GPTConfig, model, "model"),
        build(OptimConfig, optim, "optim"),
        parse(plain(cfg.data)),
        None if elsewhere else pick(cfg.trainer.accelerator, cfg.trainer.precision, cfg.compile),
        counts["max_steps"],
        counts["accumulate_grad_batches"],
    )
    wrong = [
        f"trainer.{name}={n} must be a whole number of at least 1"
        for name, n in counts.items()
        if not isinstance(n, int) or n < 1
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
    if not isinstance(cfg.causality.allow_leak, bool):
        raise ValueError(f"causality.allow_leak={cfg.causality.allow_leak} must be true or false")
    if not plan.model.causal and not cfg.causality.allow_leak:
        what = "model.causal=false lets every position see the future, so its losses would be false"
        raise ValueError(f"{what}; say causality.allow_leak=true where that is meant")
    lr_factor(0, plan.steps, plan.optim.schedule)  # a warm-up longer than the run
    if cfg.trainer.get("limit_val_batches") == 0:
        raise ValueError("trainer.limit_val_batches=0 leaves no validation, which every run ends with; leave it out")
    if isinstance(cfg.trainer.max_time, int | float):
        raise ValueError(
            f"trainer.max_time={cfg.trainer.max_time} must be DD:HH:MM:SS, such as 00:00:10:00 for ten minutes, or null"
        )
    if plan.model.backend == "flex" and plan.hardware is not None and plan.hardware.accelerator != "cuda":
        raise ValueError(
            f"model.backend=flex trains on CUDA only, and this run is on {plan.hardware.accelerator}; use model.backend=fused"
        )
    if plan.model.backend == "flex" and 0 < plan.model.head_size < FLEX_SMALLEST_HEAD:
        needed = f"needs a head size of at least {FLEX_SMALLEST_HEAD}, not {plan.model.head_size} (model.head_dim, or dim / n_heads)"
        raise ValueError(f"model.backend=flex {needed}; use model.backend=fused")
    hardware = plan.hardware
    if (
        hardware is not None and hardware.compile == CUDA_GRAPHS and plan.accumulate > 1
    ):  # the first's gradients lie where the second writes
        raise ValueError(
            f"compile={CUDA_GRAPHS} needs trainer.accumulate_grad_batches=1, not {plan.accumulate}; use compile=default"
        )
    return plan


def vocabulary(chosen: int | None, needed: int) -> int:
    """Rows of the embedding. Raises ValueError where the tokenizer has more tokens than were chosen."""
    if chosen is not None and chosen < needed:
        raise ValueError(
            f"model.vocab_size={chosen} is too small for the tokenizer's {needed} tokens; raise it, or leave it null"
        )
    return chosen or needed
