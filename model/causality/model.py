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
CACHE = re.compile("cache|past|state")  # an argument that holds earlier keys and values
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
LOWER = (torch.float32, torch.bfloat16, torch.float16)
PROBE = (2, 7)  # rows and positions of the call that shows which outputs have positions: no usual layout has 7
CONTEXTS = ("context_length", "max_position_embeddings", "n_positions", "block_size", "max_seq_len")


class ModelError(ValueError):
    """The model under test raises an exception or returns no outputs; its exception is the cause."""


def unchanged(function: Any) -> Any:
    return function


@dataclass(frozen=True)
class Model:
    """A function from ids (B, T) to outputs (B, T, *), and what its outputs may depend on.

    Attributes:
        function: an `nn.Module` or any callable; a variant of the model has another one.
        call: (function, ids (B, T), **inputs) -> outputs (B, T, *).
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
    """

    name: str
    function: Callable[..., Any]
    call: Callable[..., Tensor]
    vocab_size: int
    context_length: int
    visible: Callable[[int], Tensor]
    ways: Mapping[str, Callable[["Model", Tensor], Tensor]] = field(default_factory=dict)
    sees_all: bool = False
    special: Sequence[int] = ()
    device: torch.device = torch.device("cpu")
    precision: str = "32-true"
    grad_mode: str = "no_grad"
    batch_size: int | None = None
    exact: bool = False
    twin: Callable[[Any], Any] | None = unchanged
    note: str = ""

    @property
    def module(self) -> nn.Module | None:
        return self.function if isinstance(self.function, nn.Module) else None

    def __call__(self, ids: Tensor, *, seed: int = 1, **inputs: Any) -> Tensor:
        """(B, T) -> (B, T, *), float32 or float64. The same seed gives the same random numbers, as of dropout."""
        return self.computed(lambda: self.call(self.function, ids.to(self.device, copy=True), **inputs), seed)

    def by_way(self, name: str, ids: Tensor) -> Tensor:
        """The outputs (B, T, V) in another way, nan where it computes none."""
        return self.computed(lambda: self.ways[name](self, ids.to(self.device, copy=True)))

    def computed(self, run: Callable[[], Tensor], seed: int = 1) -> Tensor:
        """What `run` returns, in the precision and the mode of the model. Raises ModelError."""
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
                outputs = run()
            except ModelError:
                raise
            except Exception as error:  # code of other projects may raise anything
                raise ModelError(f"{self.name} raised {one_line(error)}") from error
        # A copy, since some models return the same buffer in each call.
        return outputs.clone() if outputs.dtype == torch.float64 else outputs.float().clone()

    def changed(self, change: Callable[[Any], Any], **fields: Any) -> "Model":
        """A model whose function is a changed copy."""
        return replace(self, function=change(copy.deepcopy(self.function)), **fields)

    def shortened(self, length: int) -> "Model":
        """The same for shorter texts."""
        return replace(self, context_length=min(length, self.context_length))

    def in_float64(self) -> "Model | None":
        """The same function in float64; None for one without twin."""
        if (twin := self.twin) is None:
            return None
        device = torch.device("cpu") if self.device.type == "mps" else self.device  # MPS has no float64
        change = lambda f: twin(f.to(device).double() if isinstance(f, nn.Module) else f)  # noqa: E731
        return self.changed(change, precision="64-true", device=device)

    def watched(self, ids: Tensor) -> tuple[Tensor, bool]:
        """The outputs, and whether the pass draws random numbers, so that passes of other shapes cannot be compared."""
        states = []

        def run() -> Tensor:
            states.append(random_state(self.device))
            outputs = self.call(self.function, ids.to(self.device, copy=True))
            states.append(random_state(self.device))
            return outputs

        return self.computed(run), states[0] != states[1]


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
    """A `Model` of a GPT, of any other module, which is copied, or of a function; arguments as in `certify`.

    Raises:
        ValueError: invalid arguments. ModelError: the function cannot be called or returns no finite outputs.
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
    if device is None:
        parameters = model.parameters() if isinstance(model, nn.Module) else iter(())
        device = next((p.device for p in parameters), torch.device("cpu"))
    if isinstance(model, nn.Module):
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
        call_gpt,
        vocab_size,
        context_length,
        visible,
        sees_all=receptive_field is not None,
        special=special_ids,
        device=torch.device(device),
        note=note,
    )
    from tril.model.gpt import GPT

    if isinstance(model, GPT):
        from tril.model.causality.gpt import with_ways

        default_visibility = expected is None and receptive_field is None
        return with_ways(subject, default_visibility=default_visibility)  # pyright: ignore[reportArgumentType, reportReturnType] one class, found under two names
    interface = Interface.of(subject)
    return replace(subject, call=interface.call, ways=interface.ways(subject))


def call_gpt(function: Callable[..., Tensor], ids: Tensor, **inputs: Any) -> Tensor:
    return function(ids, **inputs)


@torch.no_grad()
def check_calls(model: Model, length: int) -> None:
    """Calls the model with texts of a length. Raises ModelError unless the outputs are finite, up to padded ids."""
    shape = (model.batch_size or 2, length)
    outputs = model(torch.randint(model.vocab_size, shape, generator=torch.Generator().manual_seed(0)))
    padded = (outputs == -torch.inf).all((0, 1))  # of ids that only fill up the vocabulary
    if not outputs[..., ~padded].isfinite().all():
        where = f"{model.name} with ids {shape} below {model.vocab_size}"
        raise ModelError(f"{where} returns nan or infinite logits, which cannot be compared; return finite ones")


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


@dataclass(frozen=True)
class Interface:
    """How a function of another project takes ids and returns outputs.

    The logits are a tensor, the first element of a tuple, the entry or the attribute `logits`. Further outputs with
    positions are tested too. A module may take `attention_mask`, `position_ids`, a cache and `use_cache`, as those of
    `transformers` do, and `targets`, without which that of nanoGPT returns the last position only.

    Attributes:
        parameters: names of the arguments after the ids.
        needs: arguments of every call, made from the ids.
        cache: the argument that holds the cache; "": there is none.
        others: numbers of the further outputs that have positions.
        first_position: of position embeddings that keep their first rows for padding, as in RoBERTa.
    """

    name: str
    vocab_size: int
    parameters: frozenset[str]
    needs: Mapping[str, Callable[[Tensor], Any]]
    cache: str = ""
    others: tuple[int, ...] = ()
    first_position: int = 0

    @classmethod
    def of(cls, model: Model) -> "Interface":
        function: Any = model.function
        after: list[inspect.Parameter] = []
        with contextlib.suppress(TypeError, ValueError):  # a builtin has no signature
            after = list(inspect.signature(function.forward if model.module else function).parameters.values())[1:]
        names = [p.name for p in after]
        needs: dict[str, Callable[[Tensor], Any]] = {}
        if any(p.name == "attention_mask" and p.default is p.empty for p in after):
            needs["attention_mask"] = torch.ones_like
        if "use_cache" in names:
            needs["use_cache"] = lambda ids: False
        cache = next((name for name in names if CACHE.search(name) and not name.startswith(("use", "out"))), "")
        tables = [m for name, m in model.module.named_modules() if "position_embedding" in name] if model.module else []
        first = max((int(i) + 1 for t in tables if isinstance(i := getattr(t, "padding_idx", None), int)), default=0)
        interface = cls(model.name, model.vocab_size, frozenset(names), needs, cache, first_position=first)
        ids = torch.zeros(PROBE[0], min(PROBE[1], model.context_length), dtype=torch.long, device=model.device)
        output = interface.probe(model, ids)
        logits = logits_in(output)
        if "targets" in names and ids.shape[1] > 1 and isinstance(logits, Tensor) and logits.shape[1] == 1:
            interface = replace(interface, needs=needs | {"targets": torch.zeros_like})
            output = interface.probe(model, ids)
        leaves = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
        shape = (*PROBE, 3)
        others = [i for i, x in enumerate(leaves) if (*x.shape[:2], x.dim()) == shape and x.is_floating_point()]
        return replace(interface, others=tuple(i for i in others if leaves[i] is not logits_in(output)))

    def probe(self, model: Model, ids: Tensor) -> Any:
        """The output of a call; None if it raises, which the full context explains."""
        outputs = []

        def run() -> Tensor:
            outputs.append(self.output(model.function, ids.clone()))
            return torch.zeros(())

        with torch.no_grad(), contextlib.suppress(ModelError):
            model.computed(run)
        return outputs[0] if outputs else None

    def output(self, function: Callable, ids: Tensor, **inputs: Any) -> Any:
        return function(ids, **{name: make(ids) for name, make in self.needs.items()} | inputs)

    def call(self, function: Callable, ids: Tensor, **inputs: Any) -> Tensor:
        """The logits, with the further outputs behind them (B, T, V + ...)."""
        output = self.output(function, ids, **inputs)
        logits, leaves = self.logits(output, ids), [x for x in tree_leaves(output) if isinstance(x, Tensor)]
        others = [leaves[i] for i in self.others if i < len(leaves) and leaves[i].shape[:2] == ids.shape]
        return torch.cat([logits, *others], dim=-1) if others else logits

    def logits(self, output: Any, ids: Tensor) -> Tensor:
        """The logits, if they are floats (B, T, V). Raises ModelError."""
        logits, shape = logits_in(output), (*ids.shape, self.vocab_size)
        if isinstance(logits, Tensor) and tuple(logits.shape) == shape and logits.is_floating_point():
            return logits
        got = f"{logits.dtype} {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        needed = f"{self.name} must return floats (B, T, V) = {shape} for ids {tuple(ids.shape)}"
        raise ModelError(f"{needed}, and returned {got}")

    def ways(self, model: Model) -> dict[str, Callable[[Model, Tensor], Tensor]]:
        """The other ways to compute the logits that the arguments allow."""
        if model.module is None:
            return {}

        def given(**inputs: Callable[[Tensor], Any]) -> Callable[[Model, Tensor], Tensor]:
            def run(model: Model, ids: Tensor) -> Tensor:
                return self.logits(
                    self.output(model.function, ids, **{k: make(ids) for k, make in inputs.items()}), ids
                )

            return run

        ways: dict[str, Callable[[Model, Tensor], Tensor]] = {}
        if self.cache and {"use_cache", "kwargs"} & self.parameters:
            ways["single tokens with the cache"] = lambda model, ids: self.decode(model, ids, [1] * ids.shape[1])
            ways["chunks with the cache"] = lambda model, ids: self.decode(model, ids, chunks(ids.shape[1]))
        if "attention_mask" in self.parameters:
            ways["a mask of ones"] = given(attention_mask=torch.ones_like)
            ways |= {"left padding": self.left_padded, "right padding": self.right_padded}
        for name in {"targets", "labels"} & self.parameters:
            ways[f"given {name}"] = given(**{name: lambda ids: ids.roll(-1, 1)})
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
            return self.logits(self.output(model.function, ids, **inputs), ids)

        return behind_padding(ids, model.vocab_size, run)

    def right_padded(self, model: Model, ids: Tensor) -> Tensor:
        end = max(1, ids.shape[1] // 2)
        mask = (torch.arange(ids.shape[1], device=ids.device) < end).expand_as(ids)
        logits = self.logits(self.output(model.function, ids, attention_mask=mask.long()), ids)
        return logits.masked_fill(~mask[..., None], torch.nan)


def logits_in(output: Any) -> Any:
    if isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    elif isinstance(output, tuple) and output and not hasattr(output, "logits"):
        output = output[0]
    return getattr(output, "logits", output)


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
def same_random_numbers(device: torch.device, seed: int = 1) -> Iterator[None]:
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
