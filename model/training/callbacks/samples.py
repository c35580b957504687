"""Generates a sample of text after every validation."""

from pathlib import Path

from lightning import Callback, Trainer
from pydantic import ValidationError
from tqdm import tqdm

from tril.model.training.errors import RunRefused
from tril.model.training.module import TrainingModule
from tril.model.validation import explain


class Samples(Callback):
    """Prints a short text after every validation and appends it to `folder`/samples.txt."""

    def __init__(
        self,
        folder: str | Path,
        *,
        prompt: str = "",
        max_new_tokens: int = 100,
        temperature: float = 0.8,
        seed: int = 0,
    ) -> None:
        self.path, self.prompt = Path(folder) / "samples.txt", str(prompt)  # prompt=1 is parsed as a number
        self.options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        try:
            pl_module.language_model().stream(self.prompt, **self.options)  # checks the arguments only
        except ValueError as error:
            message = explain(error) if isinstance(error, ValidationError) else error
            raise RunRefused(f"callbacks.samples: {message}; ~callbacks.samples removes it") from error

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if not trainer.is_global_zero:
            return
        text = pl_module.language_model().generate(self.prompt, **self.options)
        text = f"--- sample at step {trainer.global_step} ---\n{self.prompt}{text}\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)
        tqdm.write(text)
