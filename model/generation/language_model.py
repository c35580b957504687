"""Generates text from text: a model with its tokenizer.

Streamed and collected text are decoded by the same code, piece by piece, so both are equal.
"""

from collections.abc import Iterator, Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tril.model.generation.generate import generate_ids
from tril.model.generation.sampling import SamplingConfig
from tril.model.gpt import GPT, GPTConfig

EOT = "<|endoftext|>"
INCOMPLETE = "\ufffd"  # decoded from the bytes of an incomplete character
MAX_INCOMPLETE = 32  # tokens to wait for the end of a character; after these, the bytes are not valid UTF-8


class LanguageModel:
    """A GPT, its tokenizer, and the token `eot` that ends a text.

    Attributes:
        model: may have more embeddings than the tokenizer has tokens.
        eot_id: the id of `eot`.
        tokenizer: a copy of the argument, without truncation and padding.
        n_ids: one more than the largest token id. A third-party tokenizer may leave gaps below it: an id without a
            token was never trained on and decodes to "".

    Raises:
        ValueError: the tokenizer has more tokens than the model, or no `eot`.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, eot: str = EOT):
        self.model, self.eot = model, eot
        self.tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.n_ids = max(self.tokenizer.get_vocab().values()) + 1
        if self.n_ids > self.config.vocab_size:
            limit = f"the model's vocab_size={self.config.vocab_size}"
            raise ValueError(
                f"the tokenizer's {self.n_ids} tokens exceed {limit}; use the tokenizer of the model's run"
            )
        eot_id = self.tokenizer.token_to_id(eot)
        if eot_id is None:
            raise ValueError(f"the tokenizer has no token {eot!r}; set eot to the token that ends its texts")
        self.eot_id: int = eot_id

    @property
    def config(self) -> GPTConfig:
        return self.model.config

    def generate(
        self,
        prompt: str | Sequence[str],
        max_new_tokens: int = 64,
        *,
        seed: int | None = 0,
        stop: str | Sequence[str] | None = None,
        use_cache: bool = True,
        head_gate: Tensor | None = None,
        compile: bool = False,
        **sampling,
    ) -> str | list[str]:
        """Continues a prompt, or several prompts as one batch.

        Args:
            prompt: an empty one starts a new text. Whitespace at its end may become part of the first new token.
                Special tokens in it, such as "<|endoftext|>", are encoded as tokens and not as text (as in Hugging
                Face transformers).
            max_new_tokens: the text also ends at the end-of-text token.
            seed: of all draws; None: a new seed each time.
            stop: strings; the text ends before the first that occurs.
            use_cache, head_gate, compile: see `tril.model.generation.generate.generate_ids`.
            **sampling: temperature, top_k, top_p, min_p, repetition_penalty: see `SamplingConfig` for the defaults.

        Returns:
            The text that follows `prompt`, without `prompt`; a list of them for a list of prompts.

        Raises:
            ValueError: a value is out of range, or a prompt contains characters that the tokenizer does not know.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        options = {"use_cache": use_cache, "head_gate": head_gate, "compile": compile, **sampling}
        steps = self._pieces(prompts, max_new_tokens=max_new_tokens, seed=seed, stop=stop, **options)
        texts = ["".join(pieces) for pieces in zip(*steps, strict=True)]
        return texts[0] if isinstance(prompt, str) else texts

    def stream(self, prompt: str, max_new_tokens: int = 64, **options) -> Iterator[str]:
        """Yields the text of `generate` in pieces, each as soon as no later token can change or remove it.

        Args:
            **options: the keyword arguments of `generate`.
        """
        steps = self._pieces([prompt], max_new_tokens=max_new_tokens, **options)
        return (piece for [piece] in steps if piece)

    def encode(self, prompt: str) -> list[int]:
        """The ids of a prompt; for an empty one, the end-of-text token.

        Raises:
            ValueError: the prompt contains characters that the tokenizer does not know.
        """
        encoding = self.tokenizer.encode(prompt, add_special_tokens=False)
        unk = getattr(self.tokenizer.model, "unk_token", None)
        spans = zip(encoding.tokens, encoding.offsets, strict=True)
        unknown = {prompt[start:end] for token, (start, end) in spans if token == unk}
        if unknown:
            raise ValueError(
                f"the prompt has {', '.join(map(repr, sorted(unknown)))}, which the tokenizer does not know; "
                "use only characters of the training text"
            )
        return encoding.ids or [self.eot_id]

    def split(self, prompt: str) -> tuple[list[int], Tensor | None]:
        """The ids that generation starts from, without a final whitespace token, which the first new token replaces.

        Returns:
            The ids, and which tokens may be the next one, (1, n_ids) bool; None: all.

        Raises:
            ValueError: the prompt contains characters that the tokenizer does not know.
        """
        kept, removed = self._heal(self.encode(prompt))
        return kept, self._replacements([removed])

    def _pieces(
        self, prompts: list[str], *, seed: int | None = 0, stop: str | Sequence[str] | None = None, **options
    ) -> Iterator[list[str]]:
        """One list per step, with the new text of each prompt."""
        stops = _stop_strings(stop)
        names = SamplingConfig.__dataclass_fields__.keys() & options.keys()
        sampling = SamplingConfig(**{name: options.pop(name) for name in names})
        healed = [self._heal(self.encode(prompt)) for prompt in prompts]
        starts, removed = [kept for kept, _ in healed], [last for _, last in healed]
        first, vocabulary = self._replacements(removed), {"eot_id": self.eot_id, "vocab_size": self.n_ids}
        steps = generate_ids(self.model, starts, sampling=sampling, seed=seed, first=first, **vocabulary, **options)
        detokenizers = [Detokenizer(self.tokenizer, *ids) for ids in zip(starts, removed, strict=True)]
        return _release(steps, [TextStream(detokenizer, self.eot_id, stops) for detokenizer in detokenizers])

    def _heal(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """Token healing: splits a prompt's ids into those to keep, and a final whitespace token to be replaced.

        A tokenizer that joins a space with the word after it hardly ever produces a separate space, so the one at the
        end of "def " is out of distribution. The first new token is drawn from those that start with that space.
        """
        last = self.tokenizer.decode(ids[-1:], skip_special_tokens=False)
        replaceable = last.isspace() and len(ids) > 1 and len(self._ids_starting_with(ids[-1])) > 1
        return (ids[:-1], ids[-1:]) if replaceable else (ids, [])

    def _replacements(self, removed: Sequence[list[int]]) -> Tensor | None:
        """The tokens that may replace what was removed from each prompt: (B, n_ids) bool; None if nothing was."""
        if not any(removed):
            return None
        allowed = torch.ones(len(removed), self.n_ids, dtype=torch.bool)
        for row, ids in zip(allowed, removed, strict=True):
            if ids:
                row[:] = False
                row[self._ids_starting_with(ids[0])] = True
        return allowed

    def _ids_starting_with(self, token: int) -> list[int]:
        start = self.tokenizer.id_to_token(token)
        assert start is not None
        return [i for text, i in self.tokenizer.get_vocab().items() if text.startswith(start)]


def _release(steps: Iterator[Tensor], streams: Sequence["TextStream"]) -> Iterator[list[str]]:
    for ids in steps:
        yield [stream.push(token) for stream, token in zip(streams, ids.tolist(), strict=True)]
        if all(stream.ended for stream in streams):
            break
    yield [stream.finish() for stream in streams]


class TextStream:
    """The new text of one prompt, which ends at the end-of-text token and before a stop string."""

    def __init__(self, detokenizer: "Detokenizer", eot_id: int, stops: Sequence[str]):
        self.detokenizer, self.eot_id, self.stops = detokenizer, eot_id, stops
        self.pending, self.ended = "", False

    def push(self, token: int) -> str:
        """Returns the text that this token makes final."""
        if self.ended:
            return ""
        return self.finish() if token == self.eot_id else self._until_stop(self.detokenizer.push(token))

    def finish(self) -> str:
        """Returns the text held back so far, as no token follows."""
        if self.ended:
            return ""
        text = self._until_stop(self.detokenizer.rest())
        if not self.ended:
            text, self.ended = text + self.pending, True
        return text

    def _until_stop(self, text: str) -> str:
        self.pending += text
        cut = find_stop(self.pending, self.stops)
        self.ended = cut is not None
        if cut is None:
            cut = len(self.pending) - partial_stop(self.pending, self.stops)
        text, self.pending = self.pending[:cut], self.pending[cut:]
        return text


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Start of the stop string that is complete first, or None; it is the same however the text is cut into pieces."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return min(ends)[1] if ends else None


def partial_stop(text: str, stops: Sequence[str]) -> int:
    """Number of characters at the end of `text` that may become a stop string."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


class Detokenizer:
    """Decodes one token after another, at a cost per token that does not grow.

    The text of a token can depend on those before it: a character of several tokens, a space that is dropped at the
    start. So each token is decoded together with the tokens of the previous piece, at first the prompt, and the text
    of that piece is removed.

    Args:
        shown: ids after the prompt that the new tokens replace, and whose text the reader already has.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), shown: Sequence[int] = ()):
        self.tokenizer = tokenizer
        self._start(list(prompt))
        self.n_shown = len(tokenizer.decode([*prompt, *shown]))

    def push(self, token: int) -> str:
        """Returns the new text; "" while a character is incomplete."""
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids)
        n_waiting = len(self.ids) - self.n_old
        if len(text) <= self.n_shown or (text.endswith(INCOMPLETE) and n_waiting < MAX_INCOMPLETE):
            return ""
        new = text[self.n_shown :]
        self._start(self.ids[self.n_old :])
        return new

    def rest(self) -> str:
        """Returns the text that is still incomplete."""
        return self.tokenizer.decode(self.ids)[self.n_shown :]

    def _start(self, ids: list[int]) -> None:
        self.ids, self.n_old, self.n_shown = ids, len(ids), len(self.tokenizer.decode(ids))


def _stop_strings(stop: str | Sequence[str] | None) -> list[str]:
    stops = [] if stop is None else [stop] if isinstance(stop, str) else list(stop)
    for text in stops:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop={text!r} must be a text of at least one character; use null for none")
    return stops
