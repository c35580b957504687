"""Generates a sample of text after every validation."""

from pathlib import Path

from lightning import Callback, Trainer
from tqdm import tqdm

from tril.model.training.errors import RunRefused
from tril.model.training.loggers import log_sample
from tril.model.training.module import TrainingModule


class Samples(Callback):
    """Prints a short text after every validation and appends it to `folder`/samples.txt."""

    def __init__(self, folder: str | Path, *, prompt: str, max_new_tokens: int, temperature: float, seed: int) -> None:
        self.path, self.prompt = Path(folder) / "samples.txt", prompt
        self.options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
        self._size = 0  # bytes of the file up to the checkpoint

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        try:
            if (lm := pl_module.language_model()) is not None:
                lm.stream(self.prompt, **self.options)  # checks the arguments only
        except ValueError as error:
            raise RunRefused(f"callbacks.samples: {error}; ~callbacks.samples removes it") from error

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Not earlier: with model_parallel, Lightning reads the checkpoint after `on_fit_start`."""
        if trainer.is_global_zero and self.path.is_file():
            with self.path.open("r+b") as file:  # later samples come again
                file.truncate(self._size)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        lm = pl_module.language_model()  # gathers a sharded model
        if lm is None or not trainer.is_global_zero:
            return
        text = lm.generate(self.prompt, **self.options)
        assert isinstance(text, str)  # of one prompt
        log_sample(trainer, self.prompt, text)
        text = f"--- sample at step {trainer.global_step} ---\n{self.prompt}{text}\n"
        with self.path.open("ab") as file:
            file.write(text.encode())
            self._size = file.tell()
        tqdm.write(text)

    def state_dict(self) -> dict[str, int]:
        return {"size": self._size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._size = state["size"]
