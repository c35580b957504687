"""Text in, text out: a model with its tokenizer.

Streamed or collected, tokens become text in the same way, piece by piece, so both give the same.
"""

from collections.abc import Iterator, Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tril.model.generation.generate import generate_ids
from tril.model.generation.sampling import SamplingConfig
from tril.model.gpt import GPT, GPTConfig

EOT = "<|endoftext|>"
INCOMPLETE = "\ufffd"  # how the bytes of a character that is not finished decode
MOST_WAITING = 32  # tokens without an end of a character in sight: the bytes are no text, whatever comes


class LanguageModel:
    """A GPT, its tokenizer, and the token `eot` that ends a text.

    n_ids: one more than the largest id of a token. A foreign tokenizer may leave gaps below it: an id without a token was never trained
    on and reads as "". The model may have more rows.

    The tokenizer is a copy, without truncation and padding. Raises ValueError if it has more tokens than the model, or no `eot`.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, eot: str = EOT):
        self.model, self.eot = model, eot
        self.tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.n_ids, n_rows = max(self.tokenizer.get_vocab().values()) + 1, model.config.vocab_size
        if self.n_ids > n_rows:
            raise ValueError(
                f"the tokenizer's {self.n_ids} tokens exceed the model's vocab_size={n_rows}; they do not belong together"
            )
        if self.tokenizer.token_to_id(eot) is None:
            raise ValueError(f"the tokenizer has no token {eot!r}; pass eot=... with the one that ends its texts")

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
        """The text that follows `prompt`, without `prompt`; for a list of prompts, which run as one batch, a list.

        prompt          an empty one begins a new text. White space at its end may become part of the first new token. Special tokens in it,
                        such as "<|endoftext|>", are read as tokens and not as text (as in Hugging Face's transformers)
        max_new_tokens  the text also ends at end-of-text
        seed            of all draws; None: a new one each time
        stop            strings: the text ends before the first that comes up
        use_cache, head_gate, compile  see `model.generate.generate_ids`
        **sampling      temperature, top_k, top_p, min_p, repetition_penalty: see `SamplingConfig`, whose defaults hold

        Raises ValueError for values out of range, and for a prompt with characters that the tokenizer does not know.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        steps = self._pieces(prompts, max_new_tokens, seed, stop, use_cache, head_gate, compile, sampling)
        texts = ["".join(pieces) for pieces in zip(*steps)]
        return texts[0] if isinstance(prompt, str) else texts

    def stream(
        self,
        prompt: str,
        max_new_tokens: int = 64,
        *,
        seed: int | None = 0,
        stop: str | Sequence[str] | None = None,
        use_cache: bool = True,
        head_gate: Tensor | None = None,
        compile: bool = False,
        **sampling,
    ) -> Iterator[str]:
        """What `generate` returns, piece by piece: as soon as no later token can change or remove it."""
        steps = self._pieces([prompt], max_new_tokens, seed, stop, use_cache, head_gate, compile, sampling)
        return (piece for [piece] in steps if piece)

    def encode(self, prompt: str) -> list[int]:
        """The prompt's ids; of an empty one the end-of-text token. Raises ValueError for characters that the tokenizer does not know."""
        encoding = self.tokenizer.encode(prompt, add_special_tokens=False)
        unknown = getattr(self.tokenizer.model, "unk_token", None)
        strange = {prompt[a:b] for token, (a, b) in zip(encoding.tokens, encoding.offsets) if token == unknown}
        if strange:
            raise ValueError(
                f"the prompt has {', '.join(map(repr, sorted(strange)))}, which the tokenizer does not know; write only what the training text has"
            )
        return encoding.ids or [self.tokenizer.token_to_id(self.eot)]

    def _pieces(
        self, prompts, max_new_tokens, seed, stop, use_cache, head_gate, compile, sampling
    ) -> Iterator[list[str]]:
        """One list per step, with the new text of each prompt."""
        stops = _check_stops(stop)
        healed = [self._heal(self.encode(prompt)) for prompt in prompts]
        starts, cut = [start for start, _ in healed], [ids for _, ids in healed]
        eot_id = self.tokenizer.token_to_id(self.eot)
        steps = generate_ids(
            self.model,
            starts,
            max_new_tokens=max_new_tokens,
            sampling=SamplingConfig(**sampling),
            seed=seed,
            use_cache=use_cache,
            eot_id=eot_id,
            vocab_size=self.n_ids,
            first=self._beginning_with(cut),
            head_gate=head_gate,
            compile=compile,
        )
        return _release(
            steps, [Row(Detokenizer(self.tokenizer, start, ids), eot_id, stops) for start, ids in zip(starts, cut)]
        )

    def _heal(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """A prompt's ids, and the white space taken off its end because it begins other tokens.

        A tokenizer that writes a space with the word behind it hardly ever ends a token with one: after the lone space of "def " the
        model would be in a place that it has not seen. So the first new token is drawn from those that begin with that space.
        """
        last = self.tokenizer.decode(ids[-1:], skip_special_tokens=False)
        healed = last.isspace() and len(ids) > 1 and len(self._ids_beginning_with(ids[-1])) > 1
        return (ids[:-1], ids[-1:]) if healed else (ids, [])

    def _beginning_with(self, cut: Sequence[list[int]]) -> Tensor | None:
        """For each row, the tokens that may replace what was cut off its prompt: boolean (B, n_ids); None if nothing was."""
        if not any(cut):
            return None
        allowed = torch.ones(len(cut), self.n_ids, dtype=torch.bool)
        for row, ids in zip(allowed, cut):
            if ids:
                row[:] = False
                row[self._ids_beginning_with(ids[0])] = True
        return allowed

    def _ids_beginning_with(self, token: int) -> list[int]:
        beginning = self.tokenizer.id_to_token(token)
        return [i for text, i in self.tokenizer.get_vocab().items() if text.startswith(beginning)]


def _release(steps: Iterator[Tensor], rows: Sequence["Row"]) -> Iterator[list[str]]:
    for ids in steps:
        yield [row.push(token) for row, token in zip(rows, ids.tolist())]
        if all(row.ended for row in rows):
            break
    yield [row.finish() for row in rows]


class Row:
    """One prompt's new tokens on their way to the reader: ends at end-of-text and before a stop string."""

    def __init__(self, detokenizer: "Detokenizer", eot_id: int, stops: Sequence[str]):
        self.detokenizer, self.eot_id, self.stops = detokenizer, eot_id, stops
        self.held, self.ended = "", False

    def push(self, token: int) -> str:
        """The text that is certain with this token and was not before."""
        if self.ended:
            return ""
        if token == self.eot_id:
            return self.finish()
        return self._until_stop(self.detokenizer.push(token))

    def finish(self) -> str:
        """What was held back, now that no token follows."""
        if self.ended:
            return ""
        text = self._until_stop(self.detokenizer.rest())
        if not self.ended:
            text, self.ended = text + self.held, True
        return text

    def _until_stop(self, text: str) -> str:
        self.held += text
        cut = find_stop(self.held, self.stops)
        self.ended = cut is not None
        if cut is None:
            cut = len(self.held) - unfinished_stop(self.held, self.stops)
        text, self.held = self.held[:cut], self.held[cut:]
        return text


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop string begins that is complete first; None without one. The answer does not depend on how text is cut in pieces."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return min(found)[1] if found else None


def unfinished_stop(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` may become a stop string."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


class Detokenizer:
    """Token after token -> text, at a cost per token that does not grow.

    What a token reads as can depend on those before it: a character of several tokens, a space that is dropped at the beginning. So
    each is decoded together with the tokens of the piece before it, at first the prompt, and that piece's text is cut off.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), shown: Sequence[int] = ()):
        """`shown`: ids after the prompt whose text the new tokens begin with, and which the reader has already."""
        self.tokenizer = tokenizer
        self._begin(list(prompt))
        self.n_shown = len(tokenizer.decode([*prompt, *shown]))

    def push(self, token: int) -> str:
        """The new text; empty while a character is incomplete."""
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids)
        waiting = len(self.ids) - self.n_old
        if len(text) <= self.n_shown or (text.endswith(INCOMPLETE) and waiting < MOST_WAITING):
            return ""
        new = text[self.n_shown :]
        self._begin(self.ids[self.n_old :])
        return new

    def rest(self) -> str:
        """What is still incomplete."""
        return self.tokenizer.decode(self.ids)[self.n_shown :]

    def _begin(self, ids: list[int]) -> None:
        self.ids, self.n_old, self.n_shown = ids, len(ids), len(self.tokenizer.decode(ids))


def _check_stops(stop: str | Sequence[str] | None) -> list[str]:
    stops = [] if stop is None else [stop] if isinstance(stop, str) else list(stop)
    for text in stops:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop={text!r} must be a text of at least one character, or null for none")
    return stops
