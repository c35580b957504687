"""The model under test: anything that maps token ids to logits, with its optional abilities.

B batch, T positions, V vocabulary, L layers.
"""

import contextlib
import copy
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from tril.model.attention import MultiHeadAttention
from tril.model.autocast import autocast
from tril.model.causality.attention_formula import ScoreFormula, expected_alibi
from tril.model.causality.receptive_field import expected_dependencies
from tril.model.config import GPTConfig
from tril.model.generation.step import decode_step
from tril.model.gpt import GPT
from tril.model.masks import document_mask, padding_mask, split_documents

Module = TypeVar("Module", bound=nn.Module)
FLOPS = 5e10  # of one core of a CPU in a second, about
SEED = 1  # for dropout: all runs of a subject drop the same units, so that two runs differ in their input only


@dataclass(frozen=True)
class ProbedLayer:
    """An attention module under test, and what its weights should be.

    Attributes:
        name: in failures, such as "layer 0".
        visible: the keys that each query may see, bool (T, S) or (H, T, S).
    """

    name: str
    module: MultiHeadAttention
    visible: Tensor
    formula: ScoreFormula = field(default_factory=ScoreFormula)


@dataclass
class Subject:
    """A function from ids (B, T) to logits (B, T, V).

    Attributes:
        module: holds the parameters; None for a plain function, which has neither gradients nor training.
        windows: number of positions that each layer sees, its own included (None: all); the expectation of the
            certificate.
        exact: hidden tokens do not even change the rounding, as where their weight is 0. False for a Fourier transform.
        special: ids that have a meaning of their own, such as end-of-text; texts contain them more often.
        note: a limitation of the measurement, which the certificate states.
        stochastic: a pass has drawn random numbers, so passes of different shapes cannot be compared.
        seconds_per_token: measured time of a pass; 0: not measured.
    """

    run: Callable[..., Tensor]
    _: KW_ONLY
    vocab_size: int
    context_length: int
    module: nn.Module | None = None
    windows: Sequence[int | None] = (None,)
    precision: str = "32-true"
    device: torch.device = torch.device("cpu")
    exact: bool = False
    special: Sequence[int] = ()
    note: str = ""
    stochastic: bool = field(default=False, init=False)
    seconds_per_token: float = field(default=0.0, init=False)

    def __call__(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, V), float32 or float64."""
        ids = ids.to(self.device)
        return self._call(lambda: self.run(ids))

    @property
    def differentiable(self) -> bool:
        """Whether there are gradients with respect to embeddings."""
        return self.module is not None

    def visible(self, length: int, layer: int | None = None) -> Tensor:
        """bool (T, T): the inputs that each output may depend on; with `layer`, the keys that its queries may see."""
        windows = self.windows if layer is None else [self.windows[layer % len(self.windows)]]
        return expected_dependencies(length, windows)

    def decode(self, ids: Tensor, sizes: Sequence[int]) -> Tensor | None:
        """The same logits, computed in chunks of `sizes` with a cache; None for a model without cache."""

    def decode_last(self, ids: Tensor, sizes: Sequence[int]) -> Tensor | None:
        """As `decode`, but the logits of the last position of each chunk only, (B, chunks, V)."""

    def decode_steps(self, ids: Tensor, n_prompt: int) -> Tensor | None:
        """The logits (B, T - n_prompt, V) after a prompt, in steps of one token whose shapes are always the same."""

    def padded(self, ids: Tensor, padding: Sequence[int]) -> Tensor | None:
        """Logits (B, T, V) with the first padding[b] positions of row b masked; None for a model without masks."""

    def packed(self, ids: Tensor, eot: int) -> Tensor | None:
        """Logits (B, T, V) where each token `eot` begins a document; None for a model without documents."""

    def attention_weights(self, ids: Tensor) -> Sequence[Tensor] | None:
        """The attention weights (B, H, T, S) of each layer as the model returns them; None where it does not."""

    def probed_layers(self, length: int) -> Sequence[ProbedLayer]:
        """The attention modules whose weights can be read while the model runs over `length` positions."""
        return ()

    def in_float64(self) -> "Subject | None":
        """The same function in float64; None for a plain function."""

    def plain(self) -> "Subject":
        """The same function at the same precision, without special kernels."""
        return self

    def n_parameters(self) -> int:
        return sum(p.numel() for p in self.module.parameters()) if self.module else 0

    def cost(self, length: int) -> float:
        """FLOPs of a forward pass of one text, or as many as take the time of it where that is longer."""
        return length * max(2 * self.n_parameters(), self.seconds_per_token * FLOPS)

    def _float64_copy(self, module: Module) -> Module:
        return copy.deepcopy(module).to(float64_device(self.device)).double()

    def _call(self, run: Callable[[], Tensor]) -> Tensor:
        """Runs in the subject's precision, with the same random numbers every time."""
        with same_random_numbers(self.device), autocast(self.device, self.precision):
            before = random_state(self.device)
            logits = run()
            self.stochastic |= before != random_state(self.device)
        return logits if logits.dtype == torch.float64 else logits.float()


class GPTSubject(Subject):
    """A `GPT`, with its cache, padding and documents."""

    def __init__(self, model: GPT, *, precision: str = "32-true", compile: bool = False):
        config = model.config
        super().__init__(
            torch.compile(model, dynamic=False) if compile else model,
            vocab_size=config.vocab_size,
            context_length=config.context_length,
            module=model,
            windows=attention_windows(config),
            precision=precision,
            device=model.embed.weight.device,
            exact=True,
        )
        self.model, self.compiled = model, compile

    @property
    def has_cache(self) -> bool:
        """False without causal mask: later tokens change earlier keys and values, so a cache cannot hold them."""
        return self.model.config.causal

    @property
    def differentiable(self) -> bool:
        """Not compiled, since hooks would compile it again; not FlexAttention on a CPU, which has no backward."""
        return not self.compiled and not (self.model.config.backend == "flex" and self.device.type == "cpu")

    def decode(self, ids: Tensor, sizes: Sequence[int]) -> Tensor | None:
        if not self.has_cache:
            return None
        cache = self.model.new_cache(len(ids), ids.shape[1])
        return self._call(lambda: torch.cat([self.run(part, cache=cache) for part in ids.split(list(sizes), 1)], 1))

    def decode_last(self, ids: Tensor, sizes: Sequence[int]) -> Tensor | None:
        if not self.has_cache:
            return None
        model, parts = self.model, ids.split(list(sizes), dim=1)
        cache = model.new_cache(len(ids), ids.shape[1])
        return self._call(
            lambda: model.logits(torch.cat([model.hidden(part, cache=cache, last_only=True) for part in parts], dim=1))
        )

    def decode_steps(self, ids: Tensor, n_prompt: int) -> Tensor | None:
        if not self.has_cache:
            return None
        model, positions = self.model, torch.arange(ids.shape[1], device=ids.device)
        cache = model.new_cache(len(ids), ids.shape[1])

        def run() -> Tensor:
            if n_prompt:
                model(ids[:, :n_prompt], cache=cache)
            steps = (decode_step(model, cache, ids[:, p : p + 1], positions[p : p + 1]) for p in positions[n_prompt:])
            return torch.stack(list(steps), dim=1)

        return self._call(run)

    def padded(self, ids: Tensor, padding: Sequence[int]) -> Tensor | None:
        visible, positions = left_padding(ids, padding)
        return self._call(lambda: self.run(ids, mask=padding_mask(visible), positions=positions))

    def packed(self, ids: Tensor, eot: int) -> Tensor | None:
        documents, positions = split_documents(ids, eot)
        return self._call(lambda: self.run(ids, mask=document_mask(documents), positions=positions))

    def probed_layers(self, length: int) -> Sequence[ProbedLayer]:
        """None of a compiled model, which hooks would compile again."""
        layers = [] if self.compiled else attention_layers(self.model)
        formula = score_formula(self.model.config, length)
        return [ProbedLayer(f"layer {i}", attn, self.visible(length, i), formula) for i, attn in enumerate(layers)]

    def plain(self) -> "GPTSubject":
        return GPTSubject(use_explicit_backend(copy.deepcopy(self.model)), precision=self.precision)

    def in_float64(self) -> "GPTSubject":
        model = self._float64_copy(self.model)
        if self.device.type == "cuda" and model.config.backend == "flex":  # its CUDA kernels have no float64
            use_explicit_backend(model)
        return GPTSubject(model, precision="64-true")


def float64_device(device: torch.device) -> torch.device:
    """Where to compute in float64 for a model on `device`: MPS has no float64."""
    return torch.device("cpu") if device.type == "mps" else device


def attention_windows(config: GPTConfig) -> list[int | None]:
    """Number of positions that each layer of a GPT sees, its own included: 1 without attention. None: all."""
    return [config.window if config.n_heads else 1] * config.n_layers


def score_formula(config: GPTConfig, length: int) -> ScoreFormula:
    """How the scores of self-attention over `length` positions follow from queries and keys."""
    rope_base = config.rope_base if config.pos == "rope" else None
    bias = expected_alibi(config.n_heads, length, length) if config.pos == "alibi" and config.n_heads else None
    return ScoreFormula(config.qk_norm, config.norm_eps, rope_base, bias)


def use_explicit_backend(model: GPT) -> GPT:
    """Changes the model in place: its attention is computed by matrix products."""
    for attn in attention_layers(model):
        attn.backend = "explicit"
    return model


def attention_layers(model: GPT) -> list[MultiHeadAttention]:
    """All of them in the order of the layers: one per layer, or two where blocks have cross-attention."""
    return [module for module in model.modules() if isinstance(module, MultiHeadAttention)]


def left_padding(ids: Tensor, padding: Sequence[int]) -> tuple[Tensor, Tensor]:
    """For ids (B, T) whose rows are left-padded by padding[b] tokens: visible, bool (B, T), and positions (B, T)."""
    columns, shift = torch.arange(ids.shape[1], device=ids.device), torch.tensor(padding, device=ids.device)[:, None]
    return columns >= shift, (columns - shift).clamp(min=0)


def random_state(device: torch.device) -> bytes:
    """State of the generator of `device`."""
    on_cpu = device.type in ("cpu", "meta")
    state = torch.default_generator.get_state() if on_cpu else torch.get_device_module(device).get_rng_state(device)
    return ctypes.string_at(state.data_ptr(), state.numel())  # no operation of torch, which fake tensors would refuse


@contextlib.contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
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
            cpu.manual_seed(SEED)
            if device.type != "cpu":
                torch.get_device_module(device).manual_seed(SEED)
            yield
    finally:
        cpu.set_state(state)


@torch.no_grad()
def randomize(module: Module, generator: torch.Generator | None = None) -> Module:
    """Draws every parameter again, since parameters that are initialized to 0 hide every leak and every missing
    dependency.

    Matrices get std 1 / sqrt(columns), which keeps the scale of their input; gains of norms are around 1; biases are
    large enough to matter. Constants that are stored as parameters without gradient, such as sinusoidal positions, are
    left alone.
    """
    for name, p in module.named_parameters():
        if not p.requires_grad:
            continue
        if p.ndim > 1:
            p.normal_(std=p.shape[-1] ** -0.5, generator=generator)
        elif name.endswith("bias"):
            p.normal_(std=0.5, generator=generator)
        else:
            p.uniform_(0.5, 1.5, generator=generator)
    return module
