"""The training step without Lightning: what every optimizer step has to compute."""

import contextlib
import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tril.data.batches import TrainWindows, on_device
from tril.model.gpt import GPT
from tril.model.training.module import TrainingModule
from tril.model.training.run_estimate import AUTOCAST
from tril.scripts.benchmarks.section import Bench
from tril.scripts.common.cli import UserError

CLIP = {None: clip_grad_norm_, "norm": clip_grad_norm_, "value": clip_grad_value_}  # by gradient_clip_algorithm


def new_module(bench: Bench) -> TrainingModule:
    """The module of train.py with fresh weights."""
    torch.manual_seed(bench.cfg["seed"])
    config = bench.run_config
    return TrainingModule(
        GPT(config.model),
        config.optim,
        total_steps=max(config.steps, bench.config.warmup + bench.config.steps),
        val_bytes_per_token=1.0,  # unused: there is no validation
        payload={},
        compile=bench.hardware.compile,
        document_eot=0 if config.data.document_mask else None,
    )


def new_windows(bench: Bench) -> TrainWindows:
    """The windows of train.py over random ids, one epoch as long as a repetition; on CUDA in the GPU's memory."""
    config, seed = bench.run_config, bench.cfg["seed"]
    size = config.tokens_per_step() * (bench.config.warmup + bench.config.steps) + 1
    tokens = np.random.default_rng(seed).integers(config.model.vocab_size, size=size, dtype=np.uint32)
    if config.model.vocab_size <= np.iinfo(np.uint16).max + 1:
        tokens = tokens.astype(np.uint16)  # as in a prepared file
    if bench.device == "cuda":
        tokens = on_device(tokens, "cuda")
    return TrainWindows(tokens, config.model.context_length, config.data.batch_size, seed)


class BareLoop:
    """Runs optimizer steps of the module with a new optimizer: batch, forward, backward, clipping, optimizer, schedule.

    Raises:
        UserError: trainer.gradient_clip_algorithm is unknown.
    """

    def __init__(self, module: TrainingModule, windows: TrainWindows, bench: Bench):
        self.device, self.precision = bench.device, bench.hardware.precision
        self.module = module.to(self.device).train()
        if self.precision == "bf16-true":
            module.to(torch.bfloat16)
        configured = module.configure_optimizers()
        self.optimizer, self.schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.scaler = torch.amp.GradScaler(self.device, enabled=self.precision == "16-mixed")
        algorithm = bench.cfg["trainer"].get("gradient_clip_algorithm")
        if algorithm not in CLIP:
            raise UserError(f"trainer.gradient_clip_algorithm={algorithm} must be norm or value")
        self.clip, self.clip_grad = bench.cfg["trainer"]["gradient_clip_val"], CLIP[algorithm]
        self.accumulate = bench.run_config.accumulate
        self.batches = itertools.chain.from_iterable(itertools.repeat(windows))

    def step(self) -> None:
        for _ in range(self.accumulate):
            inputs, targets = (ids.to(self.device, non_blocking=True) for ids in next(self.batches))
            with self.forward_context():
                loss = self.module.training_step((inputs, targets), 0)
            self.scaler.scale(loss / self.accumulate).backward()
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            self.clip_grad(self.parameters, self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """Autocast and default dtype as Lightning's precision plugins set them."""
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16 if self.precision == "bf16-true" else default)
        dtype = AUTOCAST.get(self.precision)
        try:
            with torch.autocast(self.device, dtype, enabled=dtype is not None, cache_enabled=False):
                yield
        finally:
            torch.set_default_dtype(default)
