"""Generates text from text: a model with its tokenizer.

Streamed and collected text are decoded by the same code, piece by piece, so both are equal.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import ValidationError
from tokenizers import Tokenizer
from torch import Tensor

from tril.data.settings import build, explain
from tril.data.tokenizer import check_ids, encode_prompt, load_tokenizer, n_ids, unknown_id
from tril.model.generation.config import SamplingConfig
from tril.model.generation.generate import generate_ids
from tril.model.gpt import GPT, GPTConfig

EOT = "<|endoftext|>"
INCOMPLETE = "\ufffd"  # decoded from the bytes of an incomplete character
PENALTY = 1.1  # of repeated tokens: texts of small models else often end in a loop
MAX_INCOMPLETE = 32  # tokens to wait for the end of a character; after these, the bytes are not valid UTF-8


class LanguageModel:
    """A GPT, its tokenizer, and the token `eot` that ends a text.

    Attributes:
        model: may have more embeddings than the tokenizer has tokens.
        eot_id: the id of `eot`.
        tokenizer: a copy of the argument, which may be its JSON, without truncation and padding.
        source: the file or folder that it was read from; None: none.
        n_ids: one more than the largest token id. A third-party tokenizer may leave gaps below it: an id without a
            token was never trained on and decodes to "".

    Raises:
        ValueError: the tokenizer has more tokens than the model, or no `eot`.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer | str, eot: str = EOT, source: Path | None = None):
        self.model, self.eot, self.source = model, eot, source
        self.tokenizer = load_tokenizer(tokenizer if isinstance(tokenizer, str) else tokenizer.to_str())
        check_ids(self.tokenizer, self.config.vocab_size)
        self.n_ids = n_ids(self.tokenizer)
        eot_id = self.tokenizer.token_to_id(eot)
        if eot_id is None:
            raise ValueError(f"the tokenizer has no token {eot!r}; set eot to the token that ends its texts")
        self.eot_id: int = eot_id

    def __repr__(self) -> str:
        c, tokens, device = self.config, self.tokenizer.get_vocab_size(), self.model.embed.weight.device
        shape = f"{c.n_layers} layers, width {c.dim}, {c.n_heads} heads, context {c.context_length}"
        parts = f"{self.model.n_parameters():,} parameters, {shape}, tokenizer of {tokens:,} tokens, on {device}"
        return f"LanguageModel({self.source or 'from no file'}: {parts})"

    @property
    def config(self) -> GPTConfig:
        return self.model.config

    def check_finite(self, name: object) -> None:
        """Raises ValueError if a weight is NaN or infinite: then no output of the model `name` means anything."""
        if not all(parameter.detach().sum().isfinite() for parameter in self.model.parameters()):
            cause = "has weights that are not finite, as its run diverged"
            raise ValueError(f"{name} {cause}; name an earlier checkpoint, or train again with a lower optim.lr")

    def generate(self, prompt: str | Sequence[str], max_new_tokens: int = 64, **options) -> str | list[str]:
        """Continues a prompt, or several prompts as one batch.

        Args:
            prompt: an empty one starts a new text. Whitespace at its end may become part of the first new token.
                Special tokens in it, such as "<|endoftext|>", are encoded as tokens and not as text (as in Hugging
                Face transformers).
            max_new_tokens: the text also ends at the end-of-text token.
            **options: temperature, top_k, top_p, min_p, repetition_penalty, stop and seed of `SamplingConfig`;
                use_cache, head_gate and compile of `tril.model.generation.generate.Rows`.

        Returns:
            The text that follows `prompt`, without `prompt`; a list of them for a list of prompts.

        Raises:
            ValueError: a value is out of range, or a prompt contains characters that the tokenizer does not know.
        """
        steps = self._pieces([prompt] if isinstance(prompt, str) else prompt, max_new_tokens, **options)
        texts = ["".join(pieces) for pieces in zip(*steps, strict=True)]
        return texts[0] if isinstance(prompt, str) else texts

    def stream(self, prompt: str, max_new_tokens: int = 64, **options) -> Iterator[str]:
        """Yields the text of `generate` in pieces, each as soon as no later token can change or remove it."""
        return (piece for [piece] in self._pieces([prompt], max_new_tokens, **options) if piece)

    @functools.cached_property
    def penalty(self) -> float:
        """The repetition penalty that suits the tokenizer: 1 if each token is a character or a byte."""
        added = {unknown_id(self.tokenizer), *self.tokenizer.get_added_tokens_decoder()}
        joins = any(len(token) > 1 and i not in added for token, i in self.tokenizer.get_vocab().items())
        return PENALTY if joins else 1.0

    def samples(self, prompts: Sequence[str], n: int = 1, **options) -> Iterator[str]:
        """The prompts, each n times, with their texts: a single one in pieces, several as one batch in numbered parts.

        Mistakes are raised by the call, see `generate`.
        """
        prompts = [prompt for prompt in prompts for _ in range(n)]
        if len(prompts) == 1:
            return itertools.chain(prompts, self.stream(prompts[0], **options), ["\n"])
        texts = enumerate(zip(prompts, self.generate(prompts, **options), strict=True), 1)
        return (f"--- {i}/{len(prompts)} ---\n{prompt}{text}\n" for i, (prompt, text) in texts)

    def encode(self, prompt: str) -> list[int]:
        """The ids of a prompt; for an empty one, the end-of-text token.

        Raises:
            ValueError: the prompt contains characters that the tokenizer does not know, or half a surrogate pair.
        """
        return encode_prompt(self.tokenizer, prompt) or [self.eot_id]

    def token_text(self, token: int) -> str:
        """One token on its own; "\\ufffd" for a part of a character."""
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def split(self, prompt: str) -> tuple[list[int], list[int], Tensor]:
        """Token healing: what generation starts from, without a whitespace token at the end of the prompt.

        A tokenizer that joins a space with the word after it hardly ever produces a separate space, so the one at the
        end of "def " is out of distribution. The first new token is drawn from those that start with that space.

        Returns:
            The ids of the prompt, those after them, which the first new token replaces, and which tokens it may be,
            (n_ids,) bool.

        Raises:
            ValueError: the prompt contains characters that the tokenizer does not know.
        """
        ids, every = self.encode(prompt), torch.ones(self.n_ids, dtype=torch.bool)
        if len(ids) > 1 and self.tokenizer.decode(ids[-1:], skip_special_tokens=False).isspace():
            space = str(self.tokenizer.id_to_token(ids[-1]))
            choices = [i for token, i in self.tokenizer.get_vocab().items() if token.startswith(space)]
            if len(choices) > 1:
                return ids[:-1], ids[-1:], torch.zeros_like(every).index_fill(0, torch.tensor(choices), True)
        return ids, [], every

    def steps(self, prompts: Sequence[str], **options) -> tuple[Iterator[Tensor], list["TextStream"]]:
        """The new ids of each step, and for each prompt what makes its text of them. The call raises mistakes.

        Args:
            **options: use_cache, head_gate, compile and observe of `generate_ids`; the others are of `SamplingConfig`.
                Without a repetition penalty, the one that suits the tokenizer.
        """
        names = ("use_cache", "head_gate", "compile", "observe")
        of_ids = {name: options.pop(name) for name in names if name in options}
        try:
            sampling = build(SamplingConfig, options)
        except ValidationError as error:
            raise ValueError(explain(error)) from None
        if sampling.repetition_penalty is None:
            sampling = replace(sampling, repetition_penalty=self.penalty)
        if not prompts:
            raise ValueError("there is no prompt; give at least one")
        ids, replaced, allowed = zip(*map(self.split, prompts), strict=True)
        of_ids["first"] = torch.stack(allowed) if any(replaced) else None
        steps = generate_ids(self.model, list(ids), sampling, eot_id=self.eot_id, vocab_size=self.n_ids, **of_ids)
        end = {"eot_id": self.eot_id, "stops": sampling.stop or ()}
        return steps, [TextStream(self.tokenizer, *start, **end) for start in zip(ids, replaced, strict=True)]

    def _pieces(self, prompts: Sequence[str], max_new_tokens: int, **options) -> Iterator[list[str]]:
        """One list per step, with the new text of each prompt. The call raises mistakes."""
        steps, streams = self.steps(prompts, max_new_tokens=max_new_tokens, **options)

        def pieces() -> Iterator[list[str]]:
            for ids in steps:
                yield [stream.push(token) for stream, token in zip(streams, ids.tolist(), strict=True)]
                if all(stream.ended for stream in streams):
                    break
            yield [stream.finish() for stream in streams]

        return pieces()


class TextStream:
    """The text of one token after another, each piece released as soon as no later token can change or remove it.

    The text of a token can depend on those before it: a character of several tokens, a space that is dropped at the
    start. So each token is decoded together with the tokens of the previous piece, at first the prompt, and the text
    of that piece is removed. (DecodeStream of tokenizers fails on bytes that are no UTF-8 if the tokenizer falls back
    to bytes, as those of SentencePiece do.) The text ends at the end-of-text token, and before the stop string that is
    complete first.

    Args:
        prompt: ids before the first token.
        replaced: ids after the prompt that the new tokens replace, and whose text the reader already has.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        replaced: Sequence[int] = (),
        *,
        eot_id: int | None = None,
        stops: Sequence[str] = (),
    ):
        self.tokenizer, self.eot_id, self.stops = tokenizer, eot_id, stops
        self.ids, self.n_old, self.n_shown = list(prompt), len(prompt), len(tokenizer.decode([*prompt, *replaced]))
        self.held, self.ended = "", False

    def push(self, token: int) -> str:
        """Returns the text that this token makes final; "" while a character is incomplete."""
        if self.ended or token == self.eot_id:
            return self.finish()
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids)
        may_change = text.endswith(INCOMPLETE) and len(self.ids) - self.n_old < MAX_INCOMPLETE
        if may_change or len(text) <= self.n_shown:
            return ""
        new, self.ids = text[self.n_shown :], self.ids[self.n_old :]
        self.n_old, self.n_shown = len(self.ids), len(self.tokenizer.decode(self.ids))
        return self._until_stop(new)

    def finish(self) -> str:
        """Returns the text held back so far, as no token follows."""
        if self.ended:
            return ""
        text = self._until_stop(self.tokenizer.decode(self.ids)[self.n_shown :])
        if not self.ended:
            text, self.ended = text + self.held, True
        return text

    def _until_stop(self, text: str) -> str:
        """The text that neither is in a stop string nor may become one, which would be the same for other pieces."""
        text = self.held + text
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in self.stops if stop in text]
        starts = (n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
        self.ended, cut = bool(ends), min(ends)[1] if ends else len(text) - max(starts, default=0)
        self.held = text[cut:]
        return text[:cut]
