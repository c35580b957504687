"""A sample of text after every validation."""

from pathlib import Path

from lightning import Callback, LightningModule, Trainer
from tokenizers import Tokenizer
from tqdm import tqdm

from tril.model.generation.language_model import LanguageModel
from tril.model.training.errors import RunRefused


class Samples(Callback):
    """Prints a short text after every validation, and keeps all of them in one file."""

    def __init__(
        self,
        folder: str | Path,
        *,
        prompt: str = "",
        max_new_tokens: int = 100,
        temperature: float = 0.8,
        seed: int = 0,
    ):
        self.path, self.prompt = Path(folder) / "samples.txt", str(prompt)  # prompt=1 arrives as a number
        self.options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        try:
            writer(pl_module).stream(self.prompt, **self.options)  # checked, not begun
        except ValueError as error:
            raise RunRefused(f"callbacks.samples: {error}; ~callbacks.samples leaves it out") from error

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        text = writer(pl_module).generate(self.prompt, **self.options)
        text = f"--- sample at step {trainer.global_step} ---\n{self.prompt}{text}\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)
        tqdm.write(text)


def writer(pl_module: LightningModule) -> LanguageModel:
    payload = pl_module.payload
    return LanguageModel(pl_module.model, Tokenizer.from_str(payload["tokenizer"]), eot=payload["eot"])
