"""Texts for training and validation: (N,) token ids each.

N tokens, V vocabulary.
"""

import torch
from torch import Tensor

from tests.causality.corpus.entry import END_OF_TEXT, VOCAB_SIZE, correct, leak

LEAK = {"family": "data", "interface": "data"}
RIGHT = {"family": "look-alike: data", "interface": "data"}
SIZES = (20_000, 2_000)  # tokens for training and for validation


def random_text(size: int) -> Tensor:
    """Uniform tokens, (N,)."""
    return torch.randint(1, VOCAB_SIZE, (size,))


def chain(size: int, n_successors: int = 4) -> Tensor:
    """(N,) of a Markov chain, in which short passages repeat as in a language."""
    generator = torch.Generator().manual_seed(1)  # one language for all texts
    successors = torch.randint(1, VOCAB_SIZE, (VOCAB_SIZE, n_successors), generator=generator)
    choices, token, tokens = torch.randint(n_successors, (size,)).tolist(), 1, []
    table = successors.tolist()
    for choice in choices:
        token = table[token][choice]
        tokens.append(token)
    return torch.tensor(tokens)


def documents(number: int, size: int = 200) -> list[Tensor]:
    """Documents that begin with an end of text."""
    return [torch.cat([torch.tensor([END_OF_TEXT]), chain(size - 1)]) for _ in range(number)]


@leak(**LEAK)
def validation_windows_in_training():
    """The validation text is a passage of the training text."""
    train = chain(SIZES[0])
    return train, train[7_000 : 7_000 + SIZES[1]].clone()


@leak(**LEAK)
def half_of_the_validation_text_in_training():
    """Every second window of 100 validation tokens is copied from training."""
    train, validation = chain(SIZES[0]), chain(SIZES[1]).view(-1, 100)
    validation[::2] = train.view(-1, 100)[: len(validation) * 10 : 20]
    return train, validation.flatten()


@leak(**LEAK)
def near_copies():
    """The validation text is a passage of the training text with 4 % of its tokens replaced."""
    train = chain(SIZES[0])
    validation = train[5_000 : 5_000 + SIZES[1]]
    return train, torch.where(torch.rand(SIZES[1]) < 0.04, random_text(SIZES[1]), validation)


@leak(**LEAK)
def overlapping_windows_split_at_random():
    """Windows of 64 with a stride of 16 are shuffled and then split, so each one shares tokens with others."""
    rows = chain(SIZES[0] // 4).unfold(0, 64, 16)
    rows = rows[torch.randperm(len(rows))]
    return rows[30:].flatten(), rows[:30].flatten()


@leak(**LEAK)
def documents_on_both_sides():
    """Half of the validation documents occur in training too, at another place."""
    train, validation = documents(100), documents(10)
    train[20:25] = validation[:5]
    return torch.cat(train), torch.cat(validation)


@leak(**LEAK)
def text_split_without_its_end():
    """The training text is the whole text, of which the last part is the validation text."""
    text = chain(SIZES[0])
    return text, text[-SIZES[1] :].clone()


@correct(**RIGHT)
def separate_random_texts():
    """Two texts of uniform tokens."""
    return random_text(SIZES[0]), random_text(SIZES[1])


@correct(**RIGHT)
def texts_of_one_language():
    """Two samples of one Markov chain, which share short passages only."""
    return chain(SIZES[0]), chain(SIZES[1])


@correct(**RIGHT)
def documents_with_a_common_header():
    """Every document begins with the same 8 tokens."""
    header = torch.arange(1, 9)
    train, validation = (torch.cat([torch.cat([header, part]) for part in documents(n)]) for n in (100, 10))
    return train, validation


@correct(**RIGHT)
def text_split_by_position():
    """The last tenth of one text is for validation."""
    return chain(sum(SIZES)).tensor_split([SIZES[0]])
