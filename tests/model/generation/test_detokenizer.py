"""Text decoded token by token against the text that the tokenizer decodes from all tokens at once."""

import random

import pytest

from tests.model.generation.test_language_model import TEXT, TOKENIZERS, byte_level, sentencepiece_like
from tril.model.generation.language_model import INCOMPLETE, Detokenizer


def in_pieces(tokenizer, ids, prompt=()):
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*map(detokenizer.push, ids), detokenizer.rest()]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_join_to_the_text_and_contain_no_partial_character(name):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(TEXT).ids
    pieces = in_pieces(tokenizer, ids)
    assert "".join(pieces) == TEXT == tokenizer.decode(ids)
    assert INCOMPLETE not in "".join(pieces)
    assert sum(map(bool, pieces)) > len(ids) / 3  # text arrives before the end


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_of_random_ids_join_to_the_decoded_ids(name):
    tokenizer, draw = TOKENIZERS[name], random.Random(0)
    for length in [*range(12), *[60] * 100]:  # mostly invalid UTF-8
        prompt, ids = (
            [draw.randrange(1, tokenizer.get_vocab_size()) for _ in range(n)] for n in (draw.randrange(3), length)
        )
        assert "".join(in_pieces(tokenizer, ids)) == tokenizer.decode(ids)
        if not tokenizer.decode(prompt).endswith(INCOMPLETE):
            assert tokenizer.decode(prompt) + "".join(in_pieces(tokenizer, ids, prompt)) == tokenizer.decode(
                prompt + ids
            )


def test_a_space_that_begins_the_continuation_is_kept():
    tokenizer = sentencepiece_like()
    assert tokenizer.decode([2, 3]) == "cats"
    assert in_pieces(tokenizer, [2, 3, 4], prompt=[1]) == [" cat", "s", " sat", ""]


@pytest.mark.parametrize("character, which", [("a", 0), ("€", 1)], ids=["valid", "invalid"])
def test_the_cost_of_a_token_does_not_grow(character, which):
    tokenizer, decoded = byte_level(), []

    class Spy:
        def decode(self, ids):
            decoded.append(len(ids))
            return tokenizer.decode(ids)

    in_pieces(
        Spy(), [tokenizer.encode(character).ids[which]] * 400
    )  # an "a", or a byte in the middle of a character, over and over
    assert max(decoded) <= 64
