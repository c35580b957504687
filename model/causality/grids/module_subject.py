"""A callable or module of another project as a subject: its outputs, its cache and its attention mask.

B batch, T positions, V vocabulary.
"""

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tril.model.causality.case import ModelError, one_line
from tril.model.causality.float64_mode import Float64Mode
from tril.model.causality.grids.first_call import WrongLogits, checked_logits
from tril.model.causality.receptive_field import embeddings_as_leaves
from tril.model.causality.subject import Subject, float64_device, left_padding, same_random_numbers

# Names of the cache as an argument and in the output; in transformers it is "cache" since 5.24.
CACHES = ("cache", "past_key_values", "cache_params", "state")
NO_DECODING, NO_PADDING = "decoding with the cache is left out", "left padding is left out"


class ModuleSubject(Subject):
    """Any callable from ids to logits.

    The logits are a tensor, the first element of a tuple, the entry or the attribute `logits`. A module may take
    `attention_mask`, `position_ids`, `past_key_values` and `use_cache`, as those of `transformers` do, and `targets`,
    without which that of nanoGPT returns the last position only.

    Args:
        name: in messages.
        expected: the positions that each output may see, bool (T, T) of a length T; None: see `receptive_field`.
        receptive_field: number of positions before its own that each output depends on; None: all.
    """

    def __init__(
        self,
        name: str,
        function: Callable,
        *,
        vocab_size: int,
        context_length: int,
        expected: Callable[[int], Tensor] | None = None,
        receptive_field: int | None = None,
        **options: Any,
    ):
        module = function if isinstance(function, nn.Module) else None
        # A bound method instead of a closure, so that a deep copy runs the copied module.
        super().__init__(
            self._logits,
            vocab_size=vocab_size,
            context_length=context_length,
            module=module,
            windows=(None if receptive_field is None else receptive_field + 1,),
            **options,
        )
        self.name, self.function, self.expected, self.twin, self.calls = name, function, expected, False, 0

    def visible(self, length: int, layer: int | None = None) -> Tensor:
        if self.expected is None or layer is not None:
            return super().visible(length, layer)
        return torch.as_tensor(self.expected(length), dtype=torch.bool)

    def _call(self, run: Callable[[], Tensor]) -> Tensor:
        self.calls += 1
        try:
            return super()._call(run)
        except WrongLogits:
            raise
        except Exception as error:  # code of other projects may raise anything
            raise ModelError(f"{self.name} ends in {one_line(error)}") from error

    def _logits(self, ids: Tensor, **inputs: Any) -> Tensor:
        return self._logits_of(self._output(ids, **inputs), ids)

    def _output(self, ids: Tensor, **inputs: Any) -> Any:
        if "attention_mask" in self.required and "attention_mask" not in inputs:
            inputs["attention_mask"] = torch.ones_like(ids)
        if "use_cache" in self.parameters:
            inputs = {"use_cache": False} | inputs
        if self.last_position_only:
            inputs["targets"] = torch.zeros_like(ids)
        # cuDNN's RNNs have no backward in evaluation mode. A copy of the ids, which the function may change.
        with torch.backends.cudnn.flags(enabled=False), Float64Mode() if self.twin else contextlib.nullcontext():
            return self.function(ids.clone(), **inputs)

    @functools.cached_property
    def last_position_only(self) -> bool:
        """Whether the function returns the logits of all positions only when it gets targets, as nanoGPT's does."""
        ids = torch.zeros(1, 2, dtype=torch.long, device=self.device)
        if "targets" not in self.parameters or self.context_length < ids.numel():
            return False
        with torch.no_grad(), same_random_numbers(self.device):
            try:
                logits = self._logits_in(self.function(ids))
            except Exception:  # the first call of a check says why
                return False
        return isinstance(logits, Tensor) and logits.shape[:2] == (1, 1)

    def _logits_of(self, output: Any, ids: Tensor) -> Tensor:
        return checked_logits(self.name, self._logits_in(output), ids, self.vocab_size)

    @staticmethod
    def _logits_in(output: Any) -> Any:
        if isinstance(output, Mapping) and "logits" in output:
            output = output["logits"]
        elif isinstance(output, tuple) and output and not hasattr(output, "logits"):
            output = output[0]
        return getattr(output, "logits", output)

    @functools.cached_property
    def differentiable(self) -> bool:
        """False for a function, and for a module that looks up no token in an `nn.Embedding` or has no backward."""
        if self.module is None:
            return False
        shape = (2, min(2, self.context_length))  # a norm over a single number has no variance
        ids = torch.ones(shape, dtype=torch.long, device=self.device)
        with embeddings_as_leaves(self.module, ids) as leaves, torch.enable_grad():
            try:
                logits = self(ids)
                if logits.requires_grad and leaves:  # Reformer's backward raises an exception in evaluation mode
                    torch.autograd.grad(logits.sum(), leaves, allow_unused=True)
                return logits.requires_grad and bool(leaves)
            except Exception:  # a module that fails at this length; others tell why
                return False

    def decode(self, ids: Tensor, sizes: Sequence[int]) -> Tensor | None:
        name = next((name for name in CACHES if name in self.parameters), "")
        if self.module is None or not name or not {"use_cache", "kwargs"} & self.parameters:
            return None
        logits, cache = [], None

        def decode_chunks() -> Tensor:
            nonlocal cache
            for part in ids.split(list(sizes), dim=1):
                output = self._output(part, use_cache=True, **{name: cache})
                cache = getattr(output, name, None)
                logits.append(self._logits_of(output, part))
            return torch.cat(logits, dim=1)

        decoded = self._if_it_works(decode_chunks, NO_DECODING)
        return None if cache is None else decoded

    def _if_it_works(self, run: Callable[[], Tensor], otherwise: str) -> Tensor | None:
        """The full pass can be certified without it, so an exception is a limitation that the certificate states."""
        try:
            return self._call(run)
        except ModelError as error:
            note = f"{otherwise}, where {error}"
        if note not in self.note:
            self.note = f"{self.note}; {note}" if self.note else note

    def padded(self, ids: Tensor, padding: Sequence[int], first_position: int = 0) -> Tensor | None:
        if self.module is None or "attention_mask" not in self.parameters:
            return None
        visible, positions = left_padding(ids, padding)
        inputs = {"attention_mask": visible.long()}  # (B, T), 0 = masked
        if "position_ids" in self.parameters:
            inputs["position_ids"] = positions + first_position * visible
        return self._if_it_works(lambda: self._logits(ids, **inputs), NO_PADDING)

    @functools.cached_property
    def parameters(self) -> set[str]:
        """Names of the arguments of the function."""
        return set(self._signature())

    @functools.cached_property
    def required(self) -> set[str]:
        """Those without default, after the first."""
        return {name for name, p in list(self._signature().items())[1:] if p.default is p.empty}

    def _signature(self) -> Mapping[str, inspect.Parameter]:
        function: Any = self.function
        try:
            return inspect.signature(function.forward if isinstance(function, nn.Module) else function).parameters
        except (TypeError, ValueError):  # a builtin
            return {}

    def in_float64(self) -> "ModuleSubject":
        twin = copy.copy(self)
        twin.__dict__.pop("differentiable", None)
        twin.twin, twin.precision, twin.device = True, "64-true", float64_device(self.device)
        if self.module is not None:
            twin.module = twin.function = self._float64_copy(self.module)
        twin.run = twin._logits
        return twin
