"""What is certified: anything that turns token ids into logits, and what more it can do.

B batch, T positions, V vocabulary, L layers.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from tril.model.causality.receptive_field import expected
from tril.model.gpt import GPT, GPTConfig
from tril.model.masks import document_mask, padding_mask, split_documents

AUTOCAST = {
    "32-true": None,
    "64-true": None,
    "bf16-true": None,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}
SEED = 1  # of dropout: every run of a subject drops the same units, so that two runs differ by their input alone


class Subject:
    """A function from ids (B, T) to logits (B, T, V).

    module    has the parameters; None: a bare function, of which neither gradients nor training can be had
    windows   how many newest positions each layer sees, its own included (None: all); what the certificate expects
    exact     what a position may not see does not even change its rounding, as where it is weighed with 0; not so in a Fourier transform
    """

    def __init__(
        self,
        run: Callable[[Tensor], Tensor],
        *,
        vocab_size: int,
        context_length: int,
        module: nn.Module | None = None,
        windows: Sequence[int | None] = (None,),
        precision: str = "32-true",
        device: torch.device | str = "cpu",
        exact: bool = False,
    ):
        self.run, self.module, self.vocab_size, self.context_length = run, module, vocab_size, context_length
        self.windows, self.precision, self.device, self.exact = tuple(windows), precision, torch.device(device), exact

    def __call__(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, V), float32 or float64."""
        return self._settled(lambda: self.run(ids))

    @property
    def differentiable(self) -> bool:
        """Whether gradients with respect to embeddings can be had."""
        return self.module is not None

    def visible(self, length: int, layer: int | None = None) -> Tensor:
        """bool (T, T): which inputs each output may see; of a layer, which keys each of its queries may see."""
        return expected(length, self.windows if layer is None else [self.windows[layer % len(self.windows)]])

    def decode(self, ids: Tensor, sizes: Sequence[int]) -> Tensor | None:
        """The same logits, computed in chunks of `sizes` with a cache; None where there is no cache."""
        return None

    def padded(self, ids: Tensor, padding: Sequence[int]) -> Tensor | None:
        """Logits (B, T, V) where the first padding[b] positions of row b are hidden and it begins behind them; None without masks."""
        return None

    def packed(self, ids: Tensor, eot: int) -> Tensor | None:
        """Logits where each token `eot` opens a document of its own; None where documents are unknown."""
        return None

    def weights(self, ids: Tensor) -> Sequence[Tensor] | None:
        """Of each layer the attention weights (B, H, T, S) as the model reports them; None where it does not."""
        return None

    def blocks(self) -> Sequence[nn.Module]:
        """The layers, in order: the longest list of modules."""
        lists = [m for m in (self.module.modules() if self.module else ()) if isinstance(m, nn.ModuleList)]
        return max(lists, key=len, default=())

    def in_float64(self) -> "Subject | None":
        """The same function without rounding to speak of; None for a bare function."""
        return None

    def plain(self) -> "Subject":
        """The same function at the same precision by the path that leaves least to chance."""
        return self

    def n_parameters(self) -> int:
        return sum(p.numel() for p in self.module.parameters()) if self.module else 0

    @property
    def float64_device(self) -> torch.device:
        return float64_device(self.device)

    def _module_in_float64(self) -> nn.Module:
        return copy.deepcopy(self.module).to(self.float64_device).double()

    def _settled(self, run: Callable[[], Tensor]) -> Tensor:
        """Runs under the precision, with the random numbers of every other run."""
        dtype = AUTOCAST[self.precision]
        # Without the cache, as Lightning has it: to a compiler the other setting would be another program.
        autocast = torch.autocast(self.device.type, dtype, cache_enabled=False) if dtype else contextlib.nullcontext()
        with same_random_numbers(self.device), autocast:
            logits = run()
        return logits if logits.dtype == torch.float64 else logits.float()


class GPTSubject(Subject):
    """A GPT of this project, with cache, padding and documents."""

    def __init__(self, model: GPT, *, precision: str = "32-true", compile: bool = False):
        config = model.config
        super().__init__(
            torch.compile(model, dynamic=False) if compile else model,
            vocab_size=config.vocab_size,
            context_length=config.context_length,
            module=model,
            windows=windows_of(config),
            precision=precision,
            device=model.embed.weight.device,
            exact=True,
        )
        self.compiled = compile

    @property
    def differentiable(
        self,
    ) -> bool:  # hooks on a compiled model would compile it again; FlexAttention has no backward on a CPU
        return not self.compiled and not (self.module.config.backend == "flex" and self.device.type == "cpu")

    def decode(self, ids: Tensor, sizes: Sequence[int]) -> Tensor | None:
        if not self.module.config.causal:
            return None  # its past changes with the future: there is nothing to keep
        cache = self.module.new_cache(len(ids), ids.shape[1])
        return self._settled(
            lambda: torch.cat([self.run(part, cache=cache) for part in ids.split(list(sizes), dim=1)], dim=1)
        )

    def newest(self, ids: Tensor, sizes: Sequence[int]) -> Tensor:
        """As in sampling, of each of the chunks the last position alone: (B, chunks, V)."""
        model, parts = self.module, ids.split(list(sizes), dim=1)
        cache = model.new_cache(len(ids), ids.shape[1])
        return self._settled(
            lambda: model.logits(torch.cat([model.hidden(part, cache=cache, last_only=True) for part in parts], dim=1))
        )

    def padded(self, ids: Tensor, padding: Sequence[int]) -> Tensor:
        visible, positions = left_padding(ids, padding)
        return self._settled(lambda: self.run(ids, mask=padding_mask(visible), positions=positions))

    def packed(self, ids: Tensor, eot: int) -> Tensor:
        documents, positions = split_documents(ids, eot)
        return self._settled(lambda: self.run(ids, mask=document_mask(documents), positions=positions))

    def blocks(self) -> Sequence[nn.Module]:
        return self.module.blocks

    def plain(self) -> "GPTSubject":
        return GPTSubject(explicitly(copy.deepcopy(self.module)), precision=self.precision)

    def in_float64(self) -> "GPTSubject":
        twin = self._module_in_float64()
        if self.device.type == "cuda" and self.module.config.backend == "flex":  # nor have flex's kernels
            explicitly(twin)
        return GPTSubject(twin, precision="64-true")


def float64_device(device: torch.device) -> torch.device:
    """Where to compute in float64 with what lies on `device`."""
    return torch.device("cpu") if device.type == "mps" else device  # MPS has no float64


def windows_of(config: GPTConfig) -> list[int | None]:
    """How many newest positions each layer of a GPT sees, its own included: without attention its own alone. None: all."""
    return [config.window if config.n_heads else 1] * config.n_layers


def explicitly(model: GPT) -> GPT:
    """The same model, its attention computed by matrix products."""
    for block in model.blocks:
        if block.attn is not None:
            block.attn.backend = "explicit"
    return model


def left_padding(ids: Tensor, padding: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Where rows of ids (B, T) begin behind padding[b] hidden places: what is visible, bool (B, T), and the positions (B, T)."""
    columns, shift = torch.arange(ids.shape[1], device=ids.device), torch.tensor(padding, device=ids.device)[:, None]
    return columns >= shift, (columns - shift).clamp(min=0)


@contextlib.contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    devices = [] if device.type == "cpu" else [device.index or 0]
    with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
        torch.manual_seed(SEED)
        yield


@torch.no_grad()
def randomise(module: nn.Module, generator: torch.Generator | None = None) -> nn.Module:
    """Draws every parameter anew: behind the zeros of an initialisation every leak, and every blindness, is hidden.

    Matrices keep the size of what they multiply (std 1 / sqrt(columns)); gains of norms lie around 1, biases do matter.
    """
    for name, p in module.named_parameters():
        if p.ndim > 1:
            p.normal_(std=p.shape[-1] ** -0.5, generator=generator)
        elif name.endswith("bias"):
            p.normal_(std=0.5, generator=generator)
        else:
            p.uniform_(0.5, 1.5, generator=generator)
    return module
