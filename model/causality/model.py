"""The model under test: token ids in, outputs out, in one state of its weights, mode and precision; and other states.

B batch, T positions, V vocabulary.
"""

import contextlib
import copy
import functools
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

Module = TypeVar("Module", bound=nn.Module)
Way = Callable[[Any, Tensor], Tensor]  # a function and ids (B, T) -> outputs (B, T, *)
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
LOWER = (torch.float32, torch.bfloat16, torch.float16)
FIRST_SEED = 1  # of the random numbers of a pass
SHARPENING = 10.0  # factor on random weights: scores become so large that a mask of -40 or a clipped one has no effect
RANDOM = "weights=random"
OUTLIERS, OUTLIER_SHARE = 1000.0, 0.1  # factor on the rows of some outputs, as trained models have them
SOME_LOGITS = 509  # that a pass computes of a large vocabulary, see `SomeLogits`; a prime, which no usual width is


class ModelError(ValueError):
    """The model under test raises an exception or returns no outputs; its exception is the cause."""


@dataclass(frozen=True, eq=False)  # two models are equal only if they are the same object
class Model:
    """A function from ids (B, T) to outputs (B, T, *), and what its outputs may depend on.

    Attributes:
        function: an `nn.Module` or any callable.
        visible: length T -> bool (T, T), the inputs that each output may depend on.
        call: how the outputs are computed.
        ways: other ways to compute the same outputs, nan where they compute none; by name.
        calls: ways with further arguments of the function, whose outputs may be others; by name.
        sees_all: every visible input must have an effect: the receptive field is known.
        special: ids that have a meaning of their own, such as end-of-text; texts contain them more often.
        precision: "32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed", or "64-true", which also computes in
            float64 where the code of the function names float32.
        grad_mode: "no_grad", "grad" or "inference".
        batch_size: of every pass, as a compiled function needs; None: any.
        exact: hidden tokens do not even change the rounding, as where their weight is 0; not in a Fourier transform.
        tolerance: by which two computations may differ, as a share of the largest output; None: float64 decides.
        some_logits: compute SOME_LOGITS of the V logits only.
        note: a limitation that the certificate states.
        nouns: names of an output and of an input in a message.
    """

    name: str
    function: Callable[..., Any]
    vocab_size: int
    context_length: int
    visible: Callable[[int], Tensor]
    call: Way = lambda function, ids: function(ids)
    ways: Mapping[str, Way] = field(default_factory=dict)
    calls: Mapping[str, Way] = field(default_factory=dict)
    sees_all: bool = False
    special: Sequence[int] = ()
    device: torch.device = torch.device("cpu")
    precision: str = "32-true"
    grad_mode: str = "no_grad"
    batch_size: int | None = None
    exact: bool = False
    tolerance: float | None = None
    some_logits: bool = False
    note: str = ""
    nouns: tuple[str, str] = ("output", "input")

    @property
    def module(self) -> nn.Module | None:
        return self.function if isinstance(self.function, nn.Module) else None

    @property
    def is_low(self) -> bool:
        """Whether the precision is lower than float32."""
        return self.precision not in ("32-true", "64-true")

    @property
    def n_logits(self) -> int:
        """Number of logits that a pass computes at each position."""
        return SOME_LOGITS if self.some_logits else self.vocab_size

    def __call__(self, ids: Tensor, *, seed: int = FIRST_SEED, way: Way | None = None) -> Tensor:
        """(B, T) -> (B, T, *), float32 or float64. The same seed gives the same random numbers, as of dropout.

        Raises:
            ModelError: the function raises an exception.
        """
        grad = self.grad_mode == "grad" or self.module is not None and self.module.training  # other kernels of torch
        with contextlib.ExitStack() as stack:
            stack.enter_context(same_random_numbers(self.device, seed))
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))  # its RNNs have no backward in evaluation
            if dtype := AUTOCAST.get(self.precision):
                stack.enter_context(torch.autocast(self.device.type, dtype, cache_enabled=False))
            if self.precision == "64-true":
                stack.enter_context(Float64Mode())
            if self.some_logits:
                stack.enter_context(SomeLogits(self.vocab_size))
            inference = self.grad_mode == "inference"
            stack.enter_context(torch.inference_mode() if inference else torch.set_grad_enabled(grad))
            ids = ids.to(self.device, copy=True)
            try:
                outputs = (way or self.call)(self.function, ids)
            except ModelError:
                raise
            except Exception as error:  # code of other projects may raise anything
                called = f"{self.name} with ids {tuple(ids.shape)} below {self.vocab_size}"
                remedy = "check vocab_size, context_length and batch_size"
                raise ModelError(f"{called} raised {one_line(error)}; {remedy}") from error
        # A copy, since some models return the same buffer in each call.
        return outputs.clone() if outputs.dtype == torch.float64 else outputs.float().clone()

    @torch.no_grad()
    def measure(self, ids: Tensor) -> tuple[Tensor, float]:
        """The outputs, and the largest one.

        Raises:
            ModelError: an output is not finite, other than those of ids that only fill up the vocabulary.
        """
        outputs = self(ids)
        padding = (outputs == -torch.inf).all((0, 1))
        scale = outputs[..., ~padding].abs().max().item()  # nan if one is
        if not scale < torch.inf:
            where = f"{self.name} with ids {tuple(ids.shape)} below {self.vocab_size}"
            raise ModelError(f"{where} returns nan or infinite logits, which cannot be compared; return finite ones")
        return outputs, scale

    def changed(self, change: Callable[[Any], Any] = lambda function: function, **fields: Any) -> "Model":
        """A model whose function is a changed copy."""
        return replace(self, function=change(copied(self.function)), **fields)

    def in_float64(self) -> "Model":
        """The same function in float64."""
        device = torch.device("cpu") if self.device.type == "mps" else self.device  # MPS has no float64
        change = lambda f: f.to(device).double() if isinstance(f, nn.Module) else f  # noqa: E731
        return self.changed(change, precision="64-true", device=device)


def copied(function: Any) -> Any:
    """A deep copy, which shares what cannot be copied, such as locks."""
    try:
        return copy.deepcopy(function)
    except Exception:  # code of other projects may raise anything
        memo: dict[int, Any] = {}
        for part in function.modules() if isinstance(function, nn.Module) else [function]:
            for value in vars(part).values():
                if isinstance(value, Tensor):  # computed from weights, as by nn.utils.weight_norm
                    memo[id(value)] = value.detach().clone()
                elif not isinstance(value, dict):
                    try:
                        copy.deepcopy(value)
                    except Exception:
                        memo[id(value)] = value
        return copy.deepcopy(function, memo)


def visible_past(length: int, lookback: int | None = None) -> Tensor:
    """bool (T, T): output i may depend on input j if 0 <= i - j <= lookback; None: on all of its past."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return (distance >= 0) & (distance <= (length if lookback is None else lookback))


def tensors_in(values: Any) -> list[Tensor]:
    """All tensors of nested containers, also of objects that a model returns."""
    found = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping):
            found += tensors_in(list(leaf.values()))
        elif hasattr(leaf, "__dict__") and not callable(leaf):
            found += tensors_in(list(vars(leaf).values()))
    return found


def one_line(error: BaseException) -> str:
    """The exception in at most 200 characters."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")


@contextlib.contextmanager
def same_random_numbers(device: torch.device, seed: int = FIRST_SEED) -> Iterator[None]:
    """Seeds the generators of the CPU and of `device`, and restores their state afterwards."""
    devices = [] if device.type in ("cpu", "meta") else [device.index or 0]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 1 ms
        if devices:
            torch.get_device_module(device).manual_seed(seed)
        yield


# What is computed: in float64, and some of many logits
class Float64Mode(TorchFunctionMode):
    """Gives every function of torch float64 tensors and dtypes for lower ones, and returns float64.

    So code that names float32 has roundings that are 10^9 times smaller. Functions that change a tensor in place run
    unchanged. Modules that compare dtypes, such as nn.LSTM, need float64 weights in addition.
    """

    def __enter__(self):
        self.default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # of functions that name no dtype
        return super().__enter__()

    def __exit__(self, *error):
        torch.set_default_dtype(self.default)
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in ("__get__", "__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__")):
            return func(*args, **kwargs)
        if name in ("float", "half", "bfloat16"):  # these methods take no dtype
            return args[0].double()
        return raised(func(*raised(args), **{key: raised(value) for key, value in kwargs.items()}))


def raised(value: Any) -> Any:
    """The value with float64 for every lower dtype, also in nested containers."""
    if isinstance(value, Tensor):
        return value.double() if value.dtype in LOWER else value
    if type(value) in (tuple, list):  # which tree_map takes ten times as long for
        return type(value)(map(raised, value))
    if isinstance(value, tuple | dict) and not isinstance(value, torch.Size):
        return tree_map(raised, value)
    return torch.float64 if isinstance(value, torch.dtype) and value in LOWER else value


class SomeLogits(TorchFunctionMode):
    """Linear layers with an output for each id of the vocabulary compute SOME_LOGITS of them, in equal distances."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.ids = torch.linspace(0, vocab_size - 1, SOME_LOGITS, dtype=torch.float64).long()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear and len(args[1]) == self.vocab_size:
            args = (args[0], *(x if x is None else x[self.ids.to(x.device)] for x in args[1:]))
        return func(*args, **(kwargs or {}))


def with_some_logits(model: Model) -> Model:
    """The model with SOME_LOGITS of its logits, if its vocabulary is large and they are the same as in a full pass."""
    if model.vocab_size <= 2 * SOME_LOGITS:
        return model
    some, ids = replace(model, some_logits=True), torch.arange(min(8, model.context_length))[None]
    ids = ids.repeat(model.batch_size or 1, 1)
    try:
        found, outputs = some(ids), model(ids)
    except ModelError:  # as where it takes no text of 8 tokens
        return model
    further = torch.arange(model.vocab_size, outputs.shape[-1])  # outputs behind the logits
    expected = outputs[..., torch.cat([SomeLogits(model.vocab_size).ids, further]).to(outputs.device)]
    return some if found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-4) else model


# Other states
Variant = tuple[str, Callable[[Model], Model]]  # a state in words, and what makes a copy of a model that is in it


def module_variants(model: Model) -> list[Variant]:
    """The variants of any module; none of a function."""
    if model.module is None:
        return []
    zeros = [b for b in model.module.buffers() if b.is_floating_point() and not b.any()]
    return [
        (RANDOM, random_weights),
        ("mode=training", copy_with(nn.Module.train)),
        ("weights=large", copy_with(functools.partial(redrawn, scale=SHARPENING))),
        *([("buffers=1 for 0", copy_with(filled))] if zeros else []),
        ("mode=with gradients", lambda model: replace(model, grad_mode="grad")),
        ("mode=inference", lambda model: replace(model, grad_mode="inference")),
        ("precision=bf16-mixed", lambda model: replace(model, precision="bf16-mixed")),
        ("precision=16-mixed", lambda model: replace(model, precision="16-mixed")),
        ("precision=bf16-true", copy_with(nn.Module.bfloat16, precision="bf16-true")),
        ("precision=16-true", copy_with(nn.Module.half, precision="16-true")),
    ]


def further_variants(model: Model) -> list[Variant]:
    """Variants of any module in what the others hold constant; none of a function."""
    if model.module is None:
        return []
    calls = [(name, lambda model, call=call: replace(model, call=call)) for name, call in model.calls.items()]
    is_checkpointed = hasattr(model.module, "gradient_checkpointing_enable")
    return [
        ("weights=heavy-tailed", copy_with(with_outliers)),
        *calls,
        *([("mode=gradient checkpointing", copy_with(checkpointed))] if is_checkpointed else []),
        ("threads=1 more", lambda model: replace(model, call=functools.partial(with_another_thread, model.call))),
        ("a fresh copy with a short text", lambda model: model.changed(context_length=min(3, model.context_length))),
    ]


def copy_with(change: Callable[[Any], nn.Module], **fields: Any) -> Callable[[Model], Model]:
    """Copies a model, and changes its module."""
    return lambda model: model.changed(change, **fields)


@torch.no_grad()
def randomize(module: Module, generator: torch.Generator | None = None, scale: float = 1.0) -> Module:
    """Draws every parameter again: those that are initialized to 0 hide every leak and every missing dependency.

    Matrices get std `scale` / sqrt(columns), which at 1 keeps the scale of their input; gains of norms are around 1;
    biases are large enough to matter. Constants that are stored as parameters without gradient, such as sinusoidal
    positions, are left alone.
    """
    for name, p in module.named_parameters():
        if not p.requires_grad:
            continue
        if p.ndim > 1:
            p.normal_(std=scale * p.shape[-1] ** -0.5, generator=generator)
        elif name.endswith("bias"):
            p.normal_(std=0.5, generator=generator)
        else:
            p.uniform_(0.5, 1.5, generator=generator)
    return module


def redrawn(module: nn.Module, scale: float = 1.0) -> nn.Module:
    """The same random weights on every device."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    return randomize(module.cpu(), torch.Generator().manual_seed(0), scale).to(device)


def random_weights(model: Model) -> Model:
    """In float64 where that runs: a recurrence forgets so fast that float32 shows nothing."""
    random = model.changed(redrawn)
    with contextlib.suppress(Exception):  # code of other projects may raise anything in float64
        precise = random.in_float64()
        precise(torch.zeros(model.batch_size or 1, min(37, model.context_length), dtype=torch.long))
        return precise
    return random


def filled(module: nn.Module) -> nn.Module:
    """A factor that is still 0 hides what it is multiplied with, so buffers of zeros become ones."""
    for buffer in module.buffers():
        if buffer.is_floating_point() and not buffer.any():
            buffer.fill_(1.0)
    return module


@torch.no_grad()
def with_outliers(module: nn.Module) -> nn.Module:
    """Random weights with some rows that are 1,000 times larger, so that clipping and guards against overflow act."""
    generator, module = torch.Generator().manual_seed(1), redrawn(module)
    for p in module.parameters():
        if p.requires_grad and p.ndim:
            rows = torch.rand(len(p), generator=generator) < OUTLIER_SHARE
            rows[torch.randint(len(p), (1,), generator=generator)] = True
            p[rows.to(p.device)] *= OUTLIERS
    return module


def checkpointed(module: nn.Module) -> nn.Module:
    name = "activation_checkpointing_enable"  # since transformers 5.24, which warns of the earlier name
    getattr(module, name if hasattr(module, name) else "gradient_checkpointing_enable")()
    return module.train()


def with_another_thread(call: Way, function: Any, ids: Tensor) -> Tensor:
    n = torch.get_num_threads()
    torch.set_num_threads(n + 1)
    try:
        return call(function, ids)
    finally:
        torch.set_num_threads(n)
