"""From tokens to text: pieces against the whole text, stop strings against a scan by characters, prompts as ids."""

import math
import random
import re

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from tests.conftest import tiny_gpt
from tests.model.tokenizers import EOT, TEXT, byte_tokenizer, merging_tokenizer
from tril.data.tokenizer import TokenizerConfig, build
from tril.model.generation.language_model import INCOMPLETE, MAX_INCOMPLETE, LanguageModel, TextStream


def characters(text="abc def"):
    return build(TokenizerConfig(kind="char"), [text])


def byte_fallback():
    """As tokenizers of SentencePiece: a run of byte tokens that is no UTF-8 is decoded as one."""
    words = [EOT, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁the"]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(list(steps))
    tokenizer.add_special_tokens([AddedToken(EOT, special=True, normalized=False)])
    return tokenizer


def with_gaps():
    """256 bytes from 0 on, a word at 290, and end-of-text at 300."""
    tokenizer = byte_tokenizer()
    vocabulary = {token: i for token, i in tokenizer.get_vocab().items() if token != EOT}
    tokenizer.model = models.BPE(vocab=vocabulary | {"Ġthe": 290, EOT: 300}, merges=[])
    return Tokenizer.from_str(tokenizer.to_str().replace('"id":256', '"id":300'))


TOKENIZERS = {"bytes": byte_tokenizer(), "bpe": merging_tokenizer(), "characters": characters(TEXT)}
DECODED = TOKENIZERS | {"gaps": with_gaps()}


def language_model(tokenizer, **choices):
    return LanguageModel(tiny_gpt(vocab_size=tokenizer.get_vocab_size(), context_length=32, **choices), tokenizer)


@given(st.sampled_from(list(DECODED)), st.lists(st.integers(0, 300), max_size=3), st.lists(st.integers(0, 300)))
def test_pieces_join_to_the_text_of_all_tokens_also_of_bytes_that_are_no_utf8(name, prompt, ids):
    tokenizer = DECODED[name]
    largest = max(tokenizer.get_vocab().values())
    prompt, ids = ([i % (largest + 1) for i in part[:MAX_INCOMPLETE]] for part in (prompt, ids))
    before, stream = tokenizer.decode(prompt), TextStream(tokenizer, prompt)
    assume(not before.endswith(INCOMPLETE))  # a prompt is a text
    pieces = [*map(stream.push, ids), stream.finish()]
    assert "".join(pieces) == tokenizer.decode(prompt + ids)[len(before) :]
    assert not any(piece.endswith(INCOMPLETE) for piece in pieces[:-1])


@given(st.lists(st.integers(0, 259), max_size=400))
def test_no_sequence_of_tokens_fails_or_makes_the_cost_of_a_token_grow(ids):
    tokenizer, decoded = byte_fallback(), []

    class Spy:
        def decode(self, ids):
            decoded.append(len(ids))
            return tokenizer.decode(ids)

    stream = TextStream(Spy(), [257])
    assert all(isinstance(piece, str) for piece in [*map(stream.push, ids), stream.finish()])
    assert max(decoded) <= 2 * MAX_INCOMPLETE
    stream = TextStream(tokenizer, [257])
    assert "".join([*map(stream.push, [1 + byte for byte in TEXT.encode()]), stream.finish()]) == TEXT
    stream = TextStream(tokenizer, [259])
    assert [*map(stream.push, [258, 259])] == ["a", " the"]  # the space, which the decoder strips at the start, is kept


@pytest.fixture
def script(monkeypatch):
    """script(row, row, ...) makes these ids what the model draws; returns the calls."""

    def play(*rows):
        calls = []

        def scripted(model, prompts, sampling, *, eot_id, **options):
            calls.append({"prompts": prompts, "sampling": sampling, **options})
            return (torch.tensor(step) for step in zip(*rows, strict=False))

        monkeypatch.setattr("tril.model.generation.language_model.generate_ids", scripted)
        return calls

    return play


def scan(text, stops):
    """Reads character by character and stops where a stop string is complete."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


STOPS = [["end"], ["b", "aab"], ["abcd", "bc"], ["aaa"], ["a", "ab"], ["é", "ab"], None]


def test_the_first_complete_stop_string_ends_a_text(script):
    tokenizer, draw = byte_tokenizer(), random.Random(0)
    lm = language_model(tokenizer)
    for stops in STOPS * 10:
        text = "".join(draw.choice([*"".join(stops or ""), "x", "é"]) for _ in range(draw.randrange(1, 14)))
        script(tokenizer.encode(text).ids)  # a token for each byte
        assert lm.generate("x", stop=stops) == "".join(lm.stream("x", stop=stops)) == scan(text, stops or ())
    script(tokenizer.encode("one two, enough").ids)
    assert list(lm.stream("x", stop=["enter", ", and"])) == ["o", "n", "e ", "t", "w", "o", ", ", "eno", "u", "g", "h"]


def test_a_list_of_prompts_is_one_batch_of_tokens_whose_rows_end_independently(script):
    tokenizer = byte_tokenizer()
    tokenizer.encode_special_tokens = True  # as it is for documents
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    eot, a, b = (tokenizer.token_to_id(c) for c in (EOT, "a", "b"))
    rows = [[a, b, eot, eot, eot], TOKENIZERS["bytes"].encode("c, d!").ids, [eot] * 5]
    calls = script(*rows)
    assert language_model(tokenizer).generate([f"a{EOT}b", "aba", ""], stop=", ") == ["ab", "c", ""]
    assert [call["prompts"] for call in calls] == [[[a, eot, b], [a, b, a], [eot]]]
    assert tokenizer.encode_special_tokens and tokenizer.truncation and tokenizer.padding  # the caller's is unchanged
    script(TOKENIZERS["bytes"].encode("aabba").ids)
    lm = LanguageModel(tiny_gpt(vocab_size=257), tokenizer, eot="b")
    assert lm.generate("x") == "aa"  # as text, "b" would be shown


@torch.no_grad()
def test_a_space_at_the_end_of_a_prompt_becomes_part_of_the_first_new_token(script):
    tokenizer = merging_tokenizer()  # has "Ġthe", "Ġspaces", ... and "Ġ" alone
    lm = language_model(tokenizer)
    space = [i for token, i in tokenizer.get_vocab().items() if token.startswith("Ġ")]
    assert len(space) > 3
    logits = lm.model(torch.tensor([tokenizer.encode("the").ids]))[0, -1]
    first = lm.generate("the ", 1, temperature=0)
    assert " " + first == tokenizer.decode([max(space, key=lambda i: logits[i])])
    rows = lm.generate(["the ", "the"], 1, temperature=0)  # rows of a batch are independent
    assert rows == [first, tokenizer.decode([logits.argmax().item()])]
    assert "".join(lm.stream("the ", 9, seed=3)) == lm.generate("the ", 9, seed=3)
    calls = script([0])
    language_model(TOKENIZERS["characters"]).generate("a ")  # a space that begins no other token stays
    assert calls[0]["prompts"] == [TOKENIZERS["characters"].encode("a ").ids] and calls[0]["first"] is None


MISTAKES = [  # a call, and what the error names
    (lambda lm: lm.generate(["abc", "axé x"]), "'x', 'é'"),
    (lambda lm: lm.stream("x"), "'x'"),
    (lambda lm: lm.generate([]), "prompt"),
    (lambda lm: lm.stream("a", max_new_tokens=0, temperature=-1, top_k=0), "max_new_tokens=0.*temperature=-1.*top_k=0"),
    (lambda lm: lm.stream("a", top_p=2, min_p=-1, repetition_penalty=0), "top_p=2.*; min_p=-1.*; repetition_penalty=0"),
    (lambda lm: lm.stream("a", stop=["a", ""], seed=-1, temperature=math.nan), "temperature=nan.*; stop.*; seed=-1"),
    (lambda lm: lm.generate("a", max_token=3), "max_token; did you mean max_new_tokens"),
]


@pytest.mark.parametrize(("call", "named"), MISTAKES)
def test_mistakes_are_named_by_the_call_and_not_with_the_first_piece(call, named):
    with pytest.raises(ValueError) as error:
        call(language_model(characters()))
    assert re.search(named, str(error.value)) and len(str(error.value).splitlines()) == 1


def test_model_and_tokenizer_must_match_and_ids_may_have_gaps(script):
    tokenizer, gaps = TOKENIZERS["bytes"], with_gaps()
    for lm in (LanguageModel(tiny_gpt(vocab_size=320), tokenizer), LanguageModel(tiny_gpt(vocab_size=320), gaps)):
        lm.generate(["", "a "], 20, temperature=5.0, top_k=None)  # rows above the last id have no token
    assert lm.n_ids == 301 and gaps.get_vocab_size() == 258
    calls = script([*gaps.encode("a").ids, 270, *gaps.encode("é").ids, 300, 299])
    assert lm.generate("x") == "aé" == "".join(lm.stream("x"))  # an id without a token decodes to nothing
    assert calls[0]["vocab_size"] == 301
    with pytest.raises(ValueError, match="257 .*vocab_size=256"):
        LanguageModel(tiny_gpt(vocab_size=256), tokenizer)
    with pytest.raises(ValueError, match="</s>"):
        LanguageModel(tiny_gpt(vocab_size=257), tokenizer, eot="</s>")


def test_text_arrives_before_its_end():
    for tokenizer in TOKENIZERS.values():
        stream, ids = TextStream(tokenizer), tokenizer.encode(TEXT).ids
        pieces = [*map(stream.push, ids), stream.finish()]
        assert "".join(pieces) == TEXT and sum(map(bool, pieces)) > len(ids) / 3
