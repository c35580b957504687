"""The model under test: token ids in, outputs out, and the ways in which it can compute the same outputs.

B batch, T positions, V vocabulary.
"""

import contextlib
import copy
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

Module = TypeVar("Module", bound=nn.Module)
Way = Callable[["Model", Tensor], Tensor]
CACHE = re.compile("cache|past|state")  # an argument that holds earlier keys and values
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
LOWER = (torch.float32, torch.bfloat16, torch.float16)
FIRST_SEED = 1  # of the random numbers of a pass
PROBE = (2, 7)  # rows and positions of the call that shows which outputs have positions: no usual layout has 7
CONTEXTS = ("context_length", "max_position_embeddings", "n_positions", "block_size", "max_seq_len")


class ModelError(ValueError):
    """The model under test raises an exception or returns no outputs; its exception is the cause."""


@dataclass(frozen=True)
class Model:
    """A function from ids (B, T) to outputs (B, T, *), and what its outputs may depend on.

    Attributes:
        function: an `nn.Module` or any callable; a variant of the model has another one.
        call: (function, ids (B, T)) -> outputs (B, T, *).
        visible: length T -> bool (T, T), the inputs that each output may depend on.
        ways: other ways to compute the first outputs (B, T, V) of ids (B, T), nan where they compute none; by name.
        sees_all: every visible input must have an effect: the receptive field is known.
        special: ids that have a meaning of their own, such as end-of-text; texts contain them more often.
        precision: "32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed", or "64-true", which also raises what the
            code of the function names float32.
        grad_mode: "no_grad", "grad" or "inference".
        batch_size: of every pass, as a compiled function needs; None: any.
        exact: hidden tokens do not even change the rounding, as where their weight is 0; not in a Fourier transform.
        twin: makes the function that computes the same in float64 of a copy; None: the function has no such twin.
        note: a limitation that the certificate states.
        nouns: what a message calls an output and an input.
    """

    name: str
    function: Callable[..., Any]
    call: Callable[..., Tensor]
    vocab_size: int
    context_length: int
    visible: Callable[[int], Tensor]
    ways: Mapping[str, Way] = field(default_factory=dict)
    sees_all: bool = False
    special: Sequence[int] = ()
    device: torch.device = torch.device("cpu")
    precision: str = "32-true"
    grad_mode: str = "no_grad"
    batch_size: int | None = None
    exact: bool = False
    twin: Callable[[Any], Any] | None = lambda function: function
    note: str = ""
    nouns: tuple[str, str] = ("output", "input")

    @property
    def module(self) -> nn.Module | None:
        return self.function if isinstance(self.function, nn.Module) else None

    def __call__(self, ids: Tensor, *, seed: int = FIRST_SEED) -> Tensor:
        """(B, T) -> (B, T, *), float32 or float64. The same seed gives the same random numbers, as of dropout."""
        return self.run(ids, self.call, seed)

    def by_way(self, name: str, ids: Tensor) -> Tensor:
        """The outputs (B, T, V) in another way, nan where it computes none."""
        return self.run(ids, lambda _, ids: self.ways[name](self, ids))

    def run(self, ids: Tensor, call: Callable[..., Tensor], seed: int = FIRST_SEED) -> Tensor:
        """What `call` returns, in the precision and the mode of the model. Raises ModelError."""
        grad = self.grad_mode == "grad" or self.module is not None and self.module.training  # other kernels of torch
        with contextlib.ExitStack() as stack:
            stack.enter_context(same_random_numbers(self.device, seed))
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))  # its RNNs have no backward in evaluation
            if dtype := AUTOCAST.get(self.precision):
                stack.enter_context(torch.autocast(self.device.type, dtype, cache_enabled=False))
            if self.precision == "64-true":
                stack.enter_context(Float64Mode())
            inference = self.grad_mode == "inference"
            stack.enter_context(torch.inference_mode() if inference else torch.set_grad_enabled(grad))
            try:
                outputs = call(self.function, ids.to(self.device, copy=True))
            except ModelError:
                raise
            except Exception as error:  # code of other projects may raise anything
                raise ModelError(f"{self.name} raised {one_line(error)}") from error
        # A copy, since some models return the same buffer in each call.
        return outputs.clone() if outputs.dtype == torch.float64 else outputs.float().clone()

    def measure(self, ids: Tensor) -> tuple[Tensor, float, bool]:
        """The outputs, the largest one, and whether the pass draws random numbers, so that other shapes differ.

        Raises:
            ModelError: an output is not finite, other than those of ids that only fill up the vocabulary.
        """
        states = []

        def call(function: Callable[..., Any], ids: Tensor) -> Tensor:
            states.append(random_state(self.device))
            outputs = self.call(function, ids)
            states.append(random_state(self.device))
            return outputs

        with torch.no_grad():
            outputs = self.run(ids, call).detach()
            padded = (outputs == -torch.inf).all((0, 1))
            scale = (outputs[..., ~padded] if padded.any() else outputs).abs().max().item()  # nan if one is
        if not scale < torch.inf:
            where = f"{self.name} with ids {tuple(ids.shape)} below {self.vocab_size}"
            raise ModelError(f"{where} returns nan or infinite logits, which cannot be compared; return finite ones")
        return outputs, scale, states[0] != states[1]

    def changed(self, change: Callable[[Any], Any], **fields: Any) -> "Model":
        """A model whose function is a changed copy."""
        return replace(self, function=change(copy.deepcopy(self.function)), **fields)

    def in_float64(self) -> "Model | None":
        """The same function in float64; None for one without twin."""
        if (twin := self.twin) is None:
            return None
        device = torch.device("cpu") if self.device.type == "mps" else self.device  # MPS has no float64
        change = lambda f: twin(f.to(device).double() if isinstance(f, nn.Module) else f)  # noqa: E731
        return self.changed(change, precision="64-true", device=device)


def as_model(
    model: Callable[..., Any],
    *,
    vocab_size: int | None = None,
    context_length: int | None = None,
    expected: Callable[[int], Tensor] | Tensor | None = None,
    receptive_field: int | None = None,
    special_ids: Sequence[int] = (),
    device: str | torch.device | None = None,
    name: str | None = None,
) -> Model:
    """A `Model` of a module, which is copied, or of a function; arguments as in `certify`.

    `tril.model.causality.gpt.subject_of` adds what a GPT can do.

    Raises:
        ValueError: invalid arguments.
    """
    config = getattr(model, "config", None)
    sizes = (getattr(config, key, None) for key in CONTEXTS)
    vocab_size = vocab_size if vocab_size is not None else getattr(config, "vocab_size", None)
    context_length = context_length if context_length is not None else next((n for n in sizes if n is not None), None)
    given = {"vocab_size": (vocab_size, 3), "context_length": (context_length, 1)}
    if receptive_field is not None:
        given["receptive_field"] = (receptive_field, 0)
    for key, (size, least) in given.items():
        if not isinstance(size, int) or size < least:
            raise ValueError(f"{key}={size} must be an integer of at least {least}; give {key}=")
    assert vocab_size is not None and context_length is not None
    if isinstance(expected, Tensor) and (expected.shape, expected.dtype) != ((context_length,) * 2, torch.bool):
        size = f"bool ({context_length}, {context_length})"
        raise ValueError(f"expected is {expected.dtype} {tuple(expected.shape)}, and must be {size}")
    note = ""
    if isinstance(model, torch._dynamo.OptimizedModule):
        model, note = model._orig_mod, "the module is tested without its compiled code"
    if isinstance(model, nn.Module):
        device = device or next((p.device for p in model.parameters()), None)
        model = copy.deepcopy(model).to(device).eval()

    def visible(length: int) -> Tensor:
        if isinstance(expected, Tensor):
            return expected[:length, :length]
        if expected is not None:
            return torch.as_tensor(expected(length), dtype=torch.bool)
        return visible_by_windows(length, [None if receptive_field is None else receptive_field + 1])

    subject = Model(
        name or str(getattr(model, "__qualname__", type(model).__name__)),
        model,
        call_directly,
        vocab_size,
        context_length,
        visible,
        sees_all=receptive_field is not None,
        special=special_ids,
        device=torch.device(device or "cpu"),
        note=note,
    )
    interface = Interface(subject)
    return replace(subject, call=interface.call, ways=interface.ways())


def call_directly(function: Callable[..., Tensor], ids: Tensor) -> Tensor:
    return function(ids)


def causal(length: int) -> Tensor:
    """bool (T, T): an output may depend on its own position and on all before."""
    return visible_by_windows(length, [None])


def visible_by_windows(length: int, windows: Sequence[int | None]) -> Tensor:
    """bool (T, T): output i may depend on input j if 0 <= i - j <= the sum of (w - 1) over the layers; None: on all.

    Computed from positions and not from the masks of the model, because those are under test.
    """
    lookback = sum(length if w is None else w - 1 for w in windows)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return (distance >= 0) & (distance <= lookback)


class Interface:
    """How a function of another project takes ids and returns outputs.

    The logits are a tensor, the first element of a tuple, the entry or the attribute `logits`. Further outputs with
    positions are tested too. A module may take `attention_mask`, `position_ids`, a cache and `use_cache`, as those of
    `transformers` do, and `targets`, without which that of nanoGPT returns the last position only.
    """

    def __init__(self, model: Model) -> None:
        function: Any = model.function
        after: list[inspect.Parameter] = []
        with contextlib.suppress(TypeError, ValueError):  # a builtin has no signature
            after = list(inspect.signature(function.forward if model.module else function).parameters.values())[1:]
        self.name, self.vocab_size, self.is_module = model.name, model.vocab_size, model.module is not None
        self.parameters = [p.name for p in after]
        self.cache = next((p for p in self.parameters if CACHE.search(p) and not p.startswith(("use", "out"))), "")
        self.needs: dict[str, Callable[[Tensor], Any]] = {}  # arguments of every call, made from the ids
        if any(p.name == "attention_mask" and p.default is p.empty for p in after):
            self.needs["attention_mask"] = torch.ones_like
        if "use_cache" in self.parameters:
            self.needs["use_cache"] = lambda ids: False
        tables = [m for name, m in model.module.named_modules() if "position_embedding" in name] if model.module else []
        # Position embeddings that keep their first rows for padding, as in RoBERTa
        paddings = [i for table in tables if isinstance(i := getattr(table, "padding_idx", None), int)]
        self.first_position = max((i + 1 for i in paddings), default=0)
        output, n_positions = self.probe(model), min(PROBE[1], model.context_length)
        if "targets" in self.parameters and getattr(logits_in(output), "shape", ()) == (PROBE[0], 1, self.vocab_size):
            self.needs["targets"] = torch.zeros_like
            output = self.probe(model)
        shape, leaves = (PROBE[0], n_positions), tensors_in(output)
        with_positions = [x.dim() == 3 and x.shape[:2] == shape and x.is_floating_point() for x in leaves]
        self.others = [i for i, x in enumerate(leaves) if with_positions[i] and x is not logits_in(output)]

    def probe(self, model: Model) -> Any:
        """The output of a short call; None if it raises, which the full context explains."""
        outputs: list[Any] = [None]
        ids = torch.zeros(PROBE[0], min(PROBE[1], model.context_length), dtype=torch.long)

        def call(function: Callable[..., Any], ids: Tensor) -> Tensor:
            outputs.append(self.output(function, ids))
            return ids

        with torch.no_grad(), contextlib.suppress(ModelError):
            model.run(ids, call)
        return outputs[-1]

    def output(self, function: Callable[..., Any], ids: Tensor, **inputs: Any) -> Any:
        return function(ids, **{name: make(ids) for name, make in self.needs.items()} | inputs)

    def call(self, function: Callable[..., Any], ids: Tensor) -> Tensor:
        """The logits, with the further outputs behind them (B, T, V + ...)."""
        output = self.output(function, ids)
        leaves = tensors_in(output) if self.others else []
        others = [leaves[i] for i in self.others if i < len(leaves) and leaves[i].shape[:2] == ids.shape]
        return torch.cat([self.logits(output, ids), *others], dim=-1)

    def logits(self, output: Any, ids: Tensor) -> Tensor:
        """The logits, if they are floats (B, T, V). Raises ModelError."""
        logits, shape = logits_in(output), (*ids.shape, self.vocab_size)
        if isinstance(logits, Tensor) and tuple(logits.shape) == shape and logits.is_floating_point():
            return logits
        got = f"{logits.dtype} {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        needed = f"{self.name} must return floats (B, T, V) = {shape} for ids {tuple(ids.shape)}"
        raise ModelError(f"{needed}, and returned {got}")

    def given(self, model: Model, ids: Tensor, **inputs: Any) -> Tensor:
        """The logits of a call with further arguments."""
        return self.logits(self.output(model.function, ids, **inputs), ids)

    def ways(self) -> dict[str, Way]:
        """The other ways to compute the logits that the arguments of a module allow."""
        ways: dict[str, Way] = {}
        if not self.is_module:
            return ways
        if self.cache and {"use_cache", "kwargs"} & set(self.parameters):
            ways["single tokens with the cache"] = lambda model, ids: self.decode(model, ids, [1] * ids.shape[1])
            ways["chunks with the cache"] = lambda model, ids: self.decode(model, ids, chunks(ids.shape[1]))
        if "attention_mask" in self.parameters:
            ways["a mask of ones"] = lambda model, ids: self.given(model, ids, attention_mask=torch.ones_like(ids))
            ways |= {"left padding": self.left_padded, "right padding": self.right_padded}
        for name in {"targets", "labels"} & set(self.parameters):
            other = lambda model, ids, name=name: self.given(model, ids, **{name: ids.roll(-1, 1)})  # noqa: E731
            ways[f"given {name}"] = other
        return ways

    def decode(self, model: Model, ids: Tensor, sizes: Sequence[int]) -> Tensor:
        logits, cache = [], None
        for part in ids.split(list(sizes), dim=1):
            output = self.output(model.function, part, use_cache=True, **{self.cache: cache})
            cache = getattr(output, self.cache, None)
            logits.append(self.logits(output, part))
        if cache is None:
            raise ModelError(f"{self.name} returns no {self.cache}")
        return torch.cat(logits, dim=1)

    def left_padded(self, model: Model, ids: Tensor) -> Tensor:
        def run(ids: Tensor, visible: Tensor, positions: Tensor) -> Tensor:
            inputs = {"attention_mask": visible.long()}
            if "position_ids" in self.parameters:
                inputs["position_ids"] = positions + self.first_position * visible
            return self.given(model, ids, **inputs)

        return behind_padding(ids, model.vocab_size, run)

    def right_padded(self, model: Model, ids: Tensor) -> Tensor:
        mask = (torch.arange(ids.shape[1], device=ids.device) < max(1, ids.shape[1] // 2)).expand_as(ids)
        return self.given(model, ids, attention_mask=mask.long()).masked_fill(~mask[..., None], torch.nan)


def logits_in(output: Any) -> Any:
    if isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    elif isinstance(output, tuple) and output and not hasattr(output, "logits"):
        output = output[0]
    return getattr(output, "logits", output)


def tensors_in(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def chunks(length: int) -> list[int]:
    """Sizes of some large chunks, then single tokens: any length is reached in few passes."""
    singles = min(4, length - 1)
    size = max(1, (length - singles) // 5)
    return [min(size, length - singles - start) for start in range(0, length - singles, size)] + [1] * singles


def behind_padding(ids: Tensor, vocab_size: int, run: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """The outputs (B, T, V) of the texts behind other tokens, a different number in each row; nan at their ends.

    Args:
        run: ids, visible and positions, (B, T) each -> outputs (B, T, V).
    """
    n, length = ids.shape
    shift = torch.tensor([(row + 1) * (length - 1) // (n + 1) for row in range(n)], device=ids.device)[:, None]
    columns = torch.arange(length, device=ids.device).expand_as(ids)
    other = (torch.arange(1, n * length + 1, device=ids.device) * 7 % vocab_size).view_as(ids)
    shifted = torch.where(columns >= shift, ids.gather(1, (columns - shift).clamp(min=0)), other)
    outputs = run(shifted, columns >= shift, (columns - shift).clamp(min=0))  # (B, T, V)
    outputs = outputs.masked_fill(outputs.isnan(), torch.inf)  # so that it differs: nan means that there is no output
    index = (columns + shift).clamp(max=length - 1)[..., None].expand_as(outputs)
    return outputs.gather(1, index).masked_fill((columns + shift >= length)[..., None], torch.nan)


class Float64Mode(TorchFunctionMode):
    """Gives every function of torch float64 tensors and dtypes for lower ones, and returns float64.

    So code that names float32 has roundings that are 10^9 times smaller. Functions that change a tensor in place run
    unchanged. Modules that compare dtypes, such as nn.LSTM, need float64 weights in addition.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in ("__get__", "__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__")):
            return func(*args, **kwargs)
        if name in ("float", "half", "bfloat16"):  # these methods take no dtype
            return args[0].double()
        return tree_map(_raised, func(*tree_map(_raised, args), **tree_map(_raised, kwargs)))


def _raised(value: object) -> object:
    if isinstance(value, Tensor) and value.dtype in LOWER:
        return value.double()
    return torch.float64 if isinstance(value, torch.dtype) and value in LOWER else value


def random_state(device: torch.device) -> bytes:
    """State of the generator of `device`."""
    if device.type in ("cpu", "meta"):
        return torch.default_generator.get_state().numpy().tobytes()
    return torch.get_device_module(device).get_rng_state(device).numpy().tobytes()


@contextlib.contextmanager
def same_random_numbers(device: torch.device, seed: int = FIRST_SEED) -> Iterator[None]:
    """Seeds the generators of the CPU and of `device`, and restores their state afterwards."""
    if device.type == "meta":  # draws nothing
        yield
        return
    cpu, on_device = torch.default_generator, contextlib.nullcontext()  # torch.manual_seed takes 1 ms
    state = cpu.get_state()
    if device.type != "cpu":
        on_device = torch.random.fork_rng([device.index or 0], device_type=device.type)
    try:
        with on_device:
            cpu.manual_seed(seed)
            if device.type != "cpu":
                torch.get_device_module(device).manual_seed(seed)
            yield
    finally:
        cpu.set_state(state)


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


def one_line(error: BaseException) -> str:
    """The exception in at most 200 characters."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
