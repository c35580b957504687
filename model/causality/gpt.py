"""A `GPT` as a `Model`: its cache, padding and documents, and its variants in all backends.

B batch, T positions, V vocabulary.
"""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tril.model import masks
from tril.model.attention import BACKENDS, MultiHeadAttention
from tril.model.causality.interface import as_model, behind_padding, chunks
from tril.model.causality.model import RANDOM, Model, Variant, Way, random_weights, randomize
from tril.model.config import GPTConfig
from tril.model.generation.generate import decode_step
from tril.model.gpt import GPT

PRECISIONS = ("32-true", "bf16-mixed")
SCORE_FACTOR = 100.0  # on queries and on keys
STEPS = 16  # of one token
DROPOUT = 0.2  # in the variants in training mode
REFERENCE = "the explicit backend in float64 on the CPU"


def subject_of(model: Callable[..., Any], **options: Any) -> Model:
    """`as_model`; a GPT also gets its ways, and its visibility unless `expected` or `receptive_field` is given."""
    if not isinstance(getattr(model, "_orig_mod", model), GPT):
        return as_model(model, **options)
    context_length = options.pop("context_length", None) or model.config.context_length
    subject = as_model(model, context_length=context_length, **options)
    given = [options[name] for name in ("expected", "receptive_field") if options.get(name) is not None]
    return with_ways(replace(subject, call=Model.call), default_visibility=not given)


def with_ways(model: Model, *, default_visibility: bool = True) -> Model:
    """Adds to the `Model` of a GPT what it can do besides a full pass, and what its outputs see."""
    gpt = model.function
    config: GPTConfig = gpt.config
    same_document = lambda document: document[:, None, :, None] == document[:, None, None, :]  # noqa: E731
    ways: dict[str, Way] = {
        "left padding": functools.partial(_behind, mask=lambda visible: visible[:, None, None]),
        "a document behind another one": functools.partial(_behind, mask=same_document),
        REFERENCE: _by_reference,
    }
    if config.causal:  # later tokens change earlier keys and values otherwise, so a cache cannot hold them
        ways |= {"chunks with the cache": _decode, "chunks and steps of constant shape": _decode_steps}
    model = replace(model, ways=ways, calls={}, exact=True)
    if not default_visibility:
        return model
    visible = functools.lru_cache(maxsize=64)(functools.partial(visible_of, config))
    return replace(model, visible=visible, sees_all=True)


def visible_of(config: GPTConfig, length: int) -> Tensor:
    """bool (T, T), the inputs that each output of a GPT may depend on.

    A layer depends on its own position, and on those that the definition of the mask shows it. That nothing depends on
    the future is required whatever the definition says.
    """
    position, itself = torch.arange(length), torch.eye(length, dtype=torch.bool)
    layer = masks.visible_from_positions(position[:, None], position, config.window).expand(length, length)  # (T, T)
    if config.canonical().key_offset:  # a key holds half of the one before
        layer = layer | F.pad(layer[:, 1:], (0, 1))
    layer, visible = layer | itself, itself
    for _ in range(config.n_layers if config.n_heads else 0):
        before, visible = visible, (visible.float() @ layer.float()) > 0
        if torch.equal(before, visible):
            break
    return visible.tril()


def _decode(gpt: Any, ids: Tensor) -> Tensor:
    """Chunks with the cache, each behind the ones before."""
    cache = gpt.new_cache(len(ids), ids.shape[1])
    return torch.cat([gpt(part, cache=cache) for part in ids.split(chunks(ids.shape[1]), 1)], dim=1)


def _decode_steps(gpt: Any, ids: Tensor) -> Tensor:
    """Most of the text at once, then up to 16 steps of one token whose shapes are always the same."""
    n_steps = min(STEPS, ids.shape[1])
    prompt, cache = ids[:, : ids.shape[1] - n_steps], gpt.new_cache(len(ids), ids.shape[1])
    parts = [gpt(prompt, cache=cache)] if prompt.numel() else []
    for position in torch.arange(ids.shape[1], device=ids.device)[-n_steps:].split(1):
        options = {"cache": cache, "cache_position": position}
        parts.append(decode_step(gpt, ids[:, position], position, cache.capacity, **options)[:, None])
    return torch.cat(parts, dim=1)


def _by_reference(gpt: Any, ids: Tensor) -> Tensor:
    """Kernels of other backends and devices may compute something else without an error."""
    with torch.autocast("cpu", enabled=False):
        outputs = reference_of(gpt)(ids.cpu())
    return outputs.float().to(ids.device) if ids.device.type == "mps" else outputs.to(ids.device)


def _behind(gpt: Any, ids: Tensor, mask: Callable[[Tensor], Tensor]) -> Tensor:
    """The outputs behind other tokens; the mask is made from which tokens are of the text, bool (B, T)."""
    run = lambda ids, visible, positions: gpt(ids, mask=mask(visible), positions=positions)  # noqa: E731
    return behind_padding(ids, gpt.config.vocab_size, run)


def reference_of(gpt: Any) -> GPT:
    """A copy in float64 on the CPU, with the explicit backend."""
    reference = copy.deepcopy(gpt).cpu().double()
    for module in reference.modules():
        if isinstance(module, MultiHeadAttention):
            module.backend = "explicit"
    return reference


def gpt_variants(
    config: GPTConfig, *, compile: bool = False, backends: Sequence[str] = tuple(BACKENDS)
) -> Iterator[Variant]:
    """Random and large weights of a GPT in every backend and precision, in evaluation and in training mode."""
    yield RANDOM, random_weights
    rates = {"embd_dropout": DROPOUT, "attn_dropout": DROPOUT if config.n_heads else 0.0, "resid_dropout": DROPOUT}
    for backend, precision in itertools.product(backends, PRECISIONS):
        name = f"backend={backend} precision={precision}"
        rebuild = functools.partial(rebuilt, precision, backend=backend)
        yield f"weights=random {name}", rebuild
        yield f"weights=large {name}", functools.partial(changed, rebuild, with_large_scores)
        dropped = functools.partial(rebuild, **rates)
        yield f"mode=training dropout={DROPOUT} {name}", functools.partial(changed, dropped, nn.Module.train)
    for precision in PRECISIONS if compile else ():
        yield f"weights=random compiled precision={precision}", functools.partial(compiled, precision)


def rebuilt(precision: str, model: Model, **settings: Any) -> Model:
    """A GPT with other settings and random weights."""
    original: Any = model.function
    gpt = randomize(type(original)(replace(original.config, **settings)), torch.Generator().manual_seed(0))
    model = replace(model, function=gpt.to(model.device).eval(), precision=precision)
    return with_ways(model, default_visibility=False)


def changed(rebuild: Callable[[Model], Model], change: Callable[[Any], Any], model: Model) -> Model:
    """With full passes only."""
    return rebuild(model).changed(change, ways={})


def with_large_scores(gpt: Any) -> Any:
    """Scores are so large that a mask of -10,000, or one that is added too late, has no effect."""
    for attn in gpt.modules():
        if isinstance(attn, MultiHeadAttention):
            for norm, projection in ((attn.q_norm, attn.q_proj), (attn.k_norm, attn.k_proj)):
                getattr(norm, "weight", projection.weight).data.mul_(SCORE_FACTOR)
    return gpt


def compiled(precision: str, model: Model) -> Model:
    model = rebuilt(precision, model)
    run = torch.compile(model.function, dynamic=False)
    return replace(model, call=lambda _, ids: run(ids), ways={}, tolerance=math.inf)
