"""Generation that shows its work: each new token with what it was drawn from, and where the model looked for it.

Letters: L layers, H heads, S tokens in the context, V vocabulary.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tril.model.generation.generate import Rows
from tril.model.generation.language_model import LanguageModel, TextStream
from tril.model.generation.sampling import Choice, choose, probabilities
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
    return [(lm.token_text(token), stream.push(token)) for token in lm.split(prompt).ids]


def live_tokens(
    lm: LanguageModel,
    prompt: str,
    *,
    max_new_tokens: int,
    seed: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    repetition_penalty: float | None = None,
    head_gate: Tensor | None = None,
) -> Iterator[LiveToken]:
    """Continues a prompt with the tokens of `LanguageModel.generate` for the same arguments.

    Within a step, hooks on the model capture the attention: only one step at a time may run on a model.

    Raises:
        ValueError: a value is out of range, or the prompt contains characters that the tokenizer does not know.
    """
    values = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "repetition_penalty": repetition_penalty}
    sampling = lm.sampling(max_new_tokens=max_new_tokens, seed=seed, **values)
    prompt_ids, _, allowed = lm.split(prompt)
    device = lm.model.embed.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    choice = Choice.of(sampling, [prompt_ids], lm.n_ids, device)
    first_choice = choice._replace(allowed=allowed.to(device))
    rows = Rows(lm.model, [prompt_ids], max_new_tokens=max_new_tokens, head_gate=head_gate)
    stream = TextStream(lm.tokenizer, prompt_ids, eot_id=lm.eot_id)

    def steps() -> Iterator[LiveToken]:  # a generator of its own: the call raises the errors above, not the first step
        for step in range(max_new_tokens):
            choice.draw(generator)
            maps: list[Tensor] = []
            with capture_attention(lm.model, lambda layer, weights, maps=maps: maps.append(weights[0, :, -1].cpu())):
                logits = rows.logits()  # (1, V)
            used = choice if step else first_choice
            ids = choose(logits, used)  # (1,)
            token = int(ids)
            text = stream.push(token) + (stream.finish() if step == max_new_tokens - 1 else "")
            attention = torch.stack(maps) if maps else torch.empty(0, 0, rows.length)  # (L, H, S)
            n_dropped, candidates = len(prompt_ids) + step - rows.length, _candidates(lm, logits, used, token)
            yield LiveToken(token, lm.token_text(token), text, candidates, attention, n_dropped)
            if token == lm.eot_id:
                return
            if choice.seen is not None:
                choice.seen[0, token] = True
            rows.append(ids)

    return steps()


def _candidates(lm: LanguageModel, logits: Tensor, choice: Choice, drawn: int) -> list[Candidate]:
    """See `LiveToken`; logits are (1, V)."""
    drawn_from = probabilities(logits, choice)[0].double().cpu()  # (vocab_size,)
    model = logits[0, : choice.vocab_size].double().softmax(-1).cpu()  # (vocab_size,)
    order = torch.where(drawn_from > 0, 1 + drawn_from, model)  # first those that could be drawn
    ids = order.topk(min(N_CANDIDATES, len(order))).indices.tolist()
    ids += [drawn] if drawn not in ids else []
    return [Candidate(i, lm.token_text(i), drawn_from[i].item(), model[i].item()) for i in ids]
