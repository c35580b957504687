"""Generation that shows its work: each new token with what it was drawn from, and where the model looked for it.

Letters: L layers, H heads, S tokens in the context, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tril.model.generation.generate import Choice, probabilities
from tril.model.generation.language_model import LanguageModel, TextStream
from tril.model.heads.attention_maps import capture_attention

N_CANDIDATES = 10


class Candidate(NamedTuple):
    """A token that could have been drawn.

    Attributes:
        name: the token on its own; "\\ufffd" for a part of a character.
        drawn_from: its probability after the penalty, temperature, top-k and top-p, and among the allowed tokens.
        model: its probability before these: the softmax of the logits.
    """

    id: int
    name: str
    drawn_from: float
    model: float


class LiveToken(NamedTuple):
    """A new token, with the step that chose it.

    Attributes:
        id: it is the end-of-text token for the last token of a text that ended.
        name: as in `Candidate`.
        text: what it adds to the text; "" while a character is incomplete.
        candidates: the `N_CANDIDATES` most probable tokens in the order of `drawn_from`, then `model`, and after them
            the drawn one if it is not among these.
        attention: (L, H, S) float32 on the CPU, the weights of the last token before this one, over itself and the
            tokens before it. (0, 0, S) for a model without heads.
        n_dropped: number of tokens at the start of the text that are no longer in the context.
    """

    id: int
    name: str
    text: str
    candidates: list[Candidate]
    attention: Tensor
    n_dropped: int


def prompt_tokens(lm: LanguageModel, prompt: str) -> list[tuple[str, str]]:
    """The name and the text of each token that generation starts from; see `LiveToken`.

    A space at the end of the prompt is missing if it becomes part of the first new token (see `LanguageModel.split`).
    """
    stream = TextStream(lm.tokenizer)
    return [(lm.token_text(token), stream.push(token)) for token in lm.split(prompt)[0]]


def live_tokens(lm: LanguageModel, prompt: str, *, max_new_tokens: int, **options: Any) -> Iterator[LiveToken]:
    """Continues a prompt with the tokens of `LanguageModel.generate` for the same arguments.

    Within a step, hooks on the model capture the attention: only one step at a time may run on a model.

    Args:
        **options: of `LanguageModel.generate`.

    Raises:
        ValueError: a value is out of range, or the prompt contains characters that the tokenizer does not know.
    """
    seen: list[tuple[Tensor, Tensor, int]] = []

    def observe(logits: Tensor, choice: Choice, length: int) -> None:
        drawn_from = probabilities(logits, choice)[0].double().cpu()  # (vocab_size,)
        seen.append((drawn_from, logits[0, : choice.vocab_size].double().softmax(-1).cpu(), length))

    steps, [of_prompt] = lm.steps([prompt], observe=observe, max_new_tokens=max_new_tokens, **options)
    stream = TextStream(lm.tokenizer, of_prompt.ids, eot_id=lm.eot_id)  # its text has a space that was replaced
    n_tokens = len(stream.ids)

    def tokens() -> Iterator[LiveToken]:  # a generator of its own: the call raises the errors above, not the first step
        for step in range(max_new_tokens):
            maps: list[Tensor] = []
            with capture_attention(lm.model, lambda layer, weights, maps=maps: maps.append(weights[0, :, -1].cpu())):
                ids = next(steps, None)
            if ids is None:  # after the end of the text
                return
            token, (drawn_from, model, length) = int(ids), seen.pop()
            text = stream.push(token) + (stream.finish() if step == max_new_tokens - 1 else "")
            order = torch.where(drawn_from > 0, 1 + drawn_from, model)  # first those that could be drawn
            best = order.topk(min(N_CANDIDATES, len(order))).indices.tolist()
            shown = [*best, *([] if token in best else [token])]
            candidates = [Candidate(i, lm.token_text(i), drawn_from[i].item(), model[i].item()) for i in shown]
            attention = torch.stack(maps) if maps else torch.empty(0, 0, length)  # (L, H, S)
            yield LiveToken(token, lm.token_text(token), text, candidates, attention, n_tokens + step - length)

    return tokens()
