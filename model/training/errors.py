"""Why a run does not start, or ends early. Each message is one line."""

import contextlib
import re
from collections.abc import Iterator

# torch's CPU allocator (Linux and macOS, then Windows) and MPS; on CUDA it has an exception of its own.
MEMORY = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory|MPS backend out of memory")


class RunRefused(ValueError):
    """A setting turns out to be wrong with the built model and its tokenizer, before the first step."""


class NonFiniteError(ValueError):
    """The loss or a gradient of a step, or a validation loss, is not a finite number. The weights are those before.

    Args:
        step: the number of steps that were made.
    """

    def __init__(self, step: int, message: str) -> None:
        super().__init__(message)
        self.step = step


class OutOfMemory(ValueError):
    """The device's memory does not suffice; the message names settings that need less."""


class RankFailed(RuntimeError):
    """Another process of the run has ended, so this one cannot continue."""


@contextlib.contextmanager
def out_of_memory(*, batch_size: int, context_length: int, dim: int) -> Iterator[None]:
    """Raises OutOfMemory, which names these settings, if an allocation of the block fails."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        import torch  # late: errors are imported before settings are checked

        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not MEMORY.search(str(error)):
            raise
        settings = f"data.batch_size={batch_size}, model.context_length={context_length} or model.dim={dim}"
        accumulate = "trainer.accumulate_grad_batches makes up for a smaller batch"
        raise OutOfMemory(f"out of memory; lower {settings} ({accumulate})") from None
