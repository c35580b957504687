"""Functions and modules of other projects as a `Model`: how they take ids, caches and padding, and return logits.

Those of `transformers` are tested with their own attention, cache and masks.

B batch, T positions, V vocabulary.
"""

import contextlib
import functools
import inspect
import logging
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tril.model.causality.model import SOME_LOGITS, Model, ModelError, Way, copied, tensors_in, visible_past

CACHE = re.compile("cache|past|state")  # an argument that holds earlier keys and values
PROBE = (2, 7)  # rows and positions of the call that shows which outputs have positions: no usual layout has 7
MAX_LENGTH = 1024  # of the context that a config names, which may be more than the memory holds
HF_LENGTH = 256  # longest input of a model of `transformers`
CONTEXTS = ("context_length", "max_position_embeddings", "n_positions", "block_size", "max_seq_len", "seq_length")


def as_model(
    model: Callable[..., Any],
    *,
    vocab_size: int | None = None,
    context_length: int | None = None,
    expected: Callable[[int], Tensor] | Tensor | None = None,
    receptive_field: int | None = None,
    special_ids: Sequence[int] = (),
    arguments: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    name: str | None = None,
    max_length: int = MAX_LENGTH,
) -> Model:
    """A `Model` of a module, which is copied, or of a function; arguments as in `certify`.

    Args:
        max_length: of the context that the config names.

    Raises:
        ValueError: invalid arguments.
    """
    config, notes = getattr(model, "config", None), []
    vocab_size = vocab_size if vocab_size is not None else getattr(config, "vocab_size", None)
    if context_length is None:
        found = [n for key in CONTEXTS if isinstance(n := getattr(config, key, None), int) and n > 0]  # -1: no limit
        context_length = min([max_length, *found]) if found else None
        if found and min(found) > max_length:
            notes.append(f"no text is longer than {max_length} of {min(found):,} tokens")
    least = {"vocab_size": 3, "context_length": 1, "receptive_field": 0, "batch_size": 1}
    for key, size in zip(least, (vocab_size, context_length, receptive_field, batch_size), strict=True):
        needed = key in ("vocab_size", "context_length")
        if (needed or size is not None) and (not isinstance(size, int) or size < least[key]):
            raise ValueError(f"{key}={size} must be an integer of at least {least[key]}; give {key}=")
    assert vocab_size is not None and context_length is not None
    if isinstance(expected, Tensor) and (expected.shape, expected.dtype) != ((context_length,) * 2, torch.bool):
        size = f"bool ({context_length}, {context_length})"
        raise ValueError(f"expected is {expected.dtype} {tuple(expected.shape)}, and must be {size}")
    if isinstance(original := getattr(model, "_orig_mod", None), nn.Module):  # importing torch._dynamo takes seconds
        model = original
        notes.append("the module is tested without its compiled code")
    if isinstance(model, nn.Module):
        device = device or next((p.device for p in model.parameters()), None)
        model = copied(model).to(device).eval()

    def visible(length: int) -> Tensor:
        if expected is None:
            return visible_past(length, receptive_field)
        seen = expected[:length, :length] if isinstance(expected, Tensor) else expected(length)
        return torch.as_tensor(seen, dtype=torch.bool)

    subject = Model(
        name or str(getattr(model, "__qualname__", type(model).__name__)),
        model,
        vocab_size,
        context_length,
        visible,
        sees_all=receptive_field is not None,
        special=special_ids,
        device=torch.device(device or "cpu"),
        batch_size=batch_size,
    )
    interface = Interface(subject, arguments or {})
    notes += [interface.untested] if interface.untested else []
    others = {} if subject.module is None else {"ways": interface.ways(), "calls": interface.calls()}
    return replace(subject, call=interface.call, note="; ".join(notes), **others)


class Interface:
    """How a function takes ids and returns outputs, by the names of its arguments.

    The logits are a tensor, the first element of a tuple, the entry or the attribute `logits`. Tril tests further
    outputs (B, T, *) too. A module may take `attention_mask`, `position_ids`, a cache and `use_cache`, as those of
    `transformers` do, and `targets`, without which that of nanoGPT returns the last position only.

    Attributes:
        needs: arguments of every call, made from the ids.
        others: the places of further outputs among all tensors that a call returns.
        untested: a note about outputs without positions.
    """

    def __init__(self, model: Model, arguments: Mapping[str, Any]) -> None:
        function: Any = model.function
        parameters: list[inspect.Parameter] = []
        with contextlib.suppress(TypeError, ValueError):  # a builtin has no signature
            signature = inspect.signature(function if model.module is None else function.forward)
            parameters = list(signature.parameters.values())[1:]
        self.name, self.vocab_size = model.name, model.vocab_size
        self.names = [p.name for p in parameters if p.name not in arguments]
        self.cache = next((n for n in self.names if CACHE.search(n) and not n.startswith(("use", "out"))), "")
        self.needs: dict[str, Callable[[Tensor], Any]] = {}
        if any(p.name == "attention_mask" and p.default is p.empty for p in parameters):
            self.needs["attention_mask"] = torch.ones_like
        if "use_cache" in self.names:
            self.needs["use_cache"] = lambda ids: False
        self.needs |= {name: lambda ids, value=value: value for name, value in arguments.items()}
        modules = [] if model.module is None else model.module.named_modules()
        tables = [getattr(m, "padding_idx", None) for name, m in modules if "position_embedding" in name]
        # Position embeddings that keep their first rows for padding, as in RoBERTa
        self.first_position = max((i + 1 for i in tables if isinstance(i, int)), default=0)

        shape = (model.batch_size or PROBE[0], min(PROBE[1], model.context_length))
        output = self.probe(model, shape)
        if "targets" in self.names and getattr(logits_in(output), "shape", ()) == (shape[0], 1, self.vocab_size):
            self.needs["targets"] = torch.zeros_like
            output = self.probe(model, shape)
        found = [(i, x) for i, x in enumerate(tensors_in(output)) if x.is_floating_point()]
        others = [(i, x) for i, x in found if x is not logits_in(output)]
        self.others = [i for i, x in others if x.dim() == 3 and x.shape[:2] == shape and x.shape[2] != shape[1]]
        left = [str(tuple(x.shape)) for i, x in others if i not in self.others and self.vocab_size in x.shape]
        self.untested = f"outputs of shape {', '.join(left)} are not tested" if left else ""

    def probe(self, model: Model, shape: tuple[int, int]) -> Any:
        """The output of a short call; None if it raises, which the full context explains."""
        outputs: list[Any] = []
        keep = lambda function, ids: outputs.append(self.output(function, ids)) or torch.zeros(1)  # noqa: E731
        with torch.no_grad(), contextlib.suppress(ModelError):
            model(torch.zeros(shape, dtype=torch.long), way=keep)
        return outputs[0] if outputs else None

    def output(self, function: Callable[..., Any], ids: Tensor, **inputs: Any) -> Any:
        return function(ids, **{name: make(ids) for name, make in self.needs.items()} | inputs)

    def call(self, function: Callable[..., Any], ids: Tensor) -> Tensor:
        """The logits, with the further outputs behind them (B, T, V + ...)."""
        output = self.output(function, ids)
        leaves = tensors_in(output) if self.others else []
        others = [leaves[i] for i in self.others if i < len(leaves) and leaves[i].shape[:2] == ids.shape]
        return torch.cat([self.logits(output, ids), *others], dim=-1)

    def logits(self, output: Any, ids: Tensor) -> Tensor:
        """The logits, if they are floats (B, T, V), or some of them. Raises ModelError."""
        logits, shape = logits_in(output), (*ids.shape, self.vocab_size)
        if isinstance(logits, Tensor) and logits.is_floating_point():
            if tuple(logits.shape) in (shape, (*ids.shape, SOME_LOGITS)):
                return logits
        got = f"{logits.dtype} {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        needed = f"{self.name} must return floats (B, T, V) = {shape} for ids {tuple(ids.shape)}"
        raise ModelError(f"{needed}, and returned {got}")

    def ways(self) -> dict[str, Way]:
        """The other ways to compute the logits that the arguments of a module allow."""
        ways: dict[str, Way] = {}
        if self.cache and {"use_cache", "kwargs"} & set(self.names):
            ways["chunks with the cache"] = self.decode
        if "attention_mask" in self.names:
            ways |= {"left padding": self.left_padded, "right padding": self.right_padded}
        return ways

    def calls(self) -> dict[str, Way]:
        """Calls of a module with a further argument, in each of which no output may see the future either."""
        documents = lambda ids: torch.arange(ids.shape[1], device=ids.device) % max(1, ids.shape[1] // 2)  # noqa: E731
        next_ids = lambda ids: ids.roll(-1, 1)  # noqa: E731
        made: dict[str, Callable[[Tensor], Any]] = {
            "attention_mask": torch.ones_like,
            "position_ids": lambda ids: documents(ids).expand_as(ids),
            "targets": next_ids,
            "labels": next_ids,
        }
        made |= {name: lambda ids: True for name in self.names if name.startswith(("output_", "use_cache"))}

        def logits(function: Any, ids: Tensor, name: str) -> Tensor:
            return self.logits(self.output(function, ids, **{name: made[name](ids)}), ids)

        return {f"argument={name}": functools.partial(logits, name=name) for name in made if name in self.names}

    def decode(self, function: Callable[..., Any], ids: Tensor) -> Tensor:
        logits, cache = [], None
        for part in ids.split(chunks(ids.shape[1]), dim=1):
            output = self.output(function, part, use_cache=True, **{self.cache: cache})
            cache = getattr(output, self.cache, None)
            logits.append(self.logits(output, part))
        if cache is None:
            raise ModelError(f"{self.name} returns no {self.cache}")
        return torch.cat(logits, dim=1)

    def left_padded(self, function: Callable[..., Any], ids: Tensor) -> Tensor:
        def run(ids: Tensor, visible: Tensor, positions: Tensor) -> Tensor:
            inputs = {"attention_mask": visible.long()}
            if "position_ids" in self.names:
                inputs["position_ids"] = positions + self.first_position * visible
            return self.logits(self.output(function, ids, **inputs), ids)

        return behind_padding(ids, self.vocab_size, run)

    def right_padded(self, function: Callable[..., Any], ids: Tensor) -> Tensor:
        mask = (torch.arange(ids.shape[1], device=ids.device) < max(1, ids.shape[1] // 2)).expand_as(ids)
        logits = self.logits(self.output(function, ids, attention_mask=mask.long()), ids)
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


def hf_model(name: str, *, device: str = "cpu") -> Model:
    """The `Model` of `transformers` that `name` stands for.

    Args:
        name: a folder written by `save_pretrained`, a name on the hub, or a config.json alone, whose model gets initial
            weights, the same ones each time.

    Raises:
        ValueError: it cannot be loaded; one line.
    """
    try:
        import transformers

        quiet()
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)  # None asks on the terminal
        model: Any
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            if Path(name).is_file():
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            else:
                model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    except ImportError as error:
        raise ValueError(f"hf={name} needs the library transformers; pip install transformers") from error
    except Exception as error:  # transformers raises many kinds, with many lines
        remedy = "name a folder written by save_pretrained, a config.json, or a model on the hub"
        message = f"hf={name} cannot be loaded; {remedy} ({error})"
        raise ValueError(textwrap.shorten(message, 300, placeholder=" ...")) from error
    if hasattr(model, "set_experts_implementation") and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the grouped kernels of experts have no float64
    return as_model(model, device=device, name=name, max_length=HF_LENGTH)


def quiet() -> None:
    """`transformers` prints errors only, and no progress bars."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
