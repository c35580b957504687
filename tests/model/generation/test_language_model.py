"""From tokens to text: streamed against collected text, stop strings against a scan by characters, prompts as ids."""

import random
import re

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.conftest import tiny_gpt
from tril.model.generation.language_model import EOT, INCOMPLETE, LanguageModel, find_stop
from tril.model.generation.sampling import SamplingConfig
from tril.scripts.common.cli import message_of

TEXT = "naïve café – 東京タワー, 😀👩‍👩‍👧 and 𝔘𝔫𝔦𝔠𝔬𝔡𝔢;\ttabs\n\n  and spaces"


def byte_level(size=257):
    """Byte-level BPE with merges across parts of characters; 257: bytes only."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=size > 257)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[EOT], initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator([TEXT, "東亰 西京 😁😂 the the then"] * 3, trainer)
    return tokenizer


def characters(text="abc def"):
    tokens = [EOT, "<|unknown|>", *sorted(set(text))]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], unk_token="<|unknown|>")
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(EOT, special=True, normalized=False)])
    return tokenizer


def sentencepiece_like():
    """A decoder that drops the space at the beginning of what it decodes."""
    words = [EOT, "▁the", "▁cat", "s", "▁sat"]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(EOT, special=True, normalized=False)])
    return tokenizer


def with_gaps():
    """256 bytes from 0 on, a word at 290, and end-of-text at 300."""
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {"Ġthe": 290, EOT: 300}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        decoders.ByteLevel(),
    )
    tokenizer.add_special_tokens([AddedToken(EOT, special=True, normalized=False)])
    return tokenizer


TOKENIZERS = {"bytes": byte_level(), "bpe": byte_level(330), "characters": characters(TEXT)}


def language_model(tokenizer, **choices):
    return LanguageModel(tiny_gpt(vocab_size=tokenizer.get_vocab_size(), context_length=32, **choices), tokenizer)


@pytest.fixture
def script(monkeypatch):
    """script(row, row, ...) makes these ids what the model draws; returns the calls."""

    def play(*rows):
        calls = []

        def scripted(model, prompts, *, max_new_tokens, eot_id, **options):
            calls.append({"prompts": prompts, "max_new_tokens": max_new_tokens, **options})
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


STOPS = [["end"], ["\n\n"], ["aab", "b"], ["abcd", "bc"], ["aaa"], ["a", "ab"], ["zzz"], ["é", "ab"], []]


@pytest.mark.parametrize("stops", STOPS, ids=str)
def test_the_first_complete_stop_string_ends_a_text_however_it_is_cut(stops, script):
    tokenizer, draw = byte_level(), random.Random(0)
    lm = language_model(tokenizer)
    for _ in range(60):
        text = "".join(draw.choice([*"".join(stops), "x", "é"]) for _ in range(draw.randrange(1, 14)))
        script(tokenizer.encode(text).ids)  # a token for each byte
        expected = scan(text, stops)
        assert lm.generate("x", stop=stops) == expected
        assert "".join(lm.stream("x", stop=stops)) == expected
        cut = find_stop(text, stops)
        assert text[:cut] == expected  # in one piece


def test_text_that_may_become_a_stop_string_is_held_back(script):
    tokenizer = byte_level()
    script(tokenizer.encode("one two, enough").ids)
    pieces = list(language_model(tokenizer).stream("x", stop=["enter", ", and"]))
    assert pieces == ["o", "n", "e ", "t", "w", "o", ", ", "eno", "u", "g", "h"]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_stream_is_generate_for_a_real_model(name):
    lm = language_model(TOKENIZERS[name])
    lengths = set()
    for seed in range(6):
        options = {"max_new_tokens": 40, "temperature": 1.5, "top_k": None, "seed": seed, "stop": [" ", "a", "京"]}
        text = lm.generate("na", **options)
        assert "".join(lm.stream("na", **options)) == text == lm.generate(["na"], **options)[0]
        lengths.add(len(text))
    assert len(lengths) > 2  # stopped at different places


def test_generate_and_stream_follow_the_seed_and_give_only_what_is_new():
    lm = language_model(TOKENIZERS["bpe"])
    one, same, other = (lm.generate("the", seed=seed, max_new_tokens=20) for seed in (3, 3, 4))
    assert one == same != other
    assert lm.generate("the", max_new_tokens=20) == lm.generate("the", max_new_tokens=20, seed=0)
    assert lm.generate("the", max_new_tokens=20, use_cache=False) == lm.generate("the", max_new_tokens=20)


def test_options_arrive(script):
    tokenizer = TOKENIZERS["bytes"]
    calls = script(tokenizer.encode("new").ids)
    lm, gate = language_model(tokenizer), torch.ones(2, 4)
    sampling = {"temperature": 0.5, "top_k": None, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2}
    assert lm.generate("old ", 7, **sampling, seed=None, head_gate=gate, compile=True) == "new"
    assert calls[0] == {
        "prompts": [tokenizer.encode("old ").ids],
        "max_new_tokens": 7,
        "sampling": SamplingConfig(0.5, None, 0.9, 0.1, 1.2),
        "seed": None,
        "use_cache": True,
        "vocab_size": tokenizer.get_vocab_size(),
        "first": None,
        "head_gate": gate,
        "compile": True,
    }
    lm.generate("old ")
    assert calls[1]["compile"] is False and calls[1]["use_cache"] and calls[1]["head_gate"] is None
    assert calls[1]["sampling"] == SamplingConfig() and calls[1]["seed"] == 0 and calls[1]["max_new_tokens"] == 64


def test_a_list_of_prompts_is_one_batch_whose_rows_end_independently(script):
    tokenizer = TOKENIZERS["bytes"]
    eot = tokenizer.token_to_id(EOT)
    rows = [[*tokenizer.encode("ab").ids, eot, eot, eot], tokenizer.encode("c, d!").ids, [eot] * 5]
    calls = script(*rows)
    assert language_model(tokenizer).generate(["1", "22", ""], stop=", ") == ["ab", "c", ""]
    assert len(calls) == 1 and [len(prompt) for prompt in calls[0]["prompts"]] == [1, 2, 1]


def test_any_token_may_be_the_end_of_text(script):
    tokenizer = TOKENIZERS["bytes"]
    script(tokenizer.encode("aabba").ids)
    assert (
        LanguageModel(tiny_gpt(vocab_size=257), tokenizer, eot="b").generate("x") == "aa"
    )  # as text, "b" would be shown


def test_nothing_is_computed_once_every_row_has_ended(monkeypatch):
    tokenizer, taken = TOKENIZERS["bytes"], []

    def plenty(*args, **options):
        for i in range(9):
            taken.append(i)
            yield torch.tensor(tokenizer.encode("abcd"[i % 4]).ids * 2)

    monkeypatch.setattr("tril.model.generation.language_model.generate_ids", plenty)
    assert language_model(tokenizer).generate(["", ""], stop="c") == ["ab", "ab"]
    assert taken == [0, 1, 2]


def test_an_incomplete_character_at_the_end_is_a_replacement_character(script):
    tokenizer = TOKENIZERS["bytes"]
    script(tokenizer.encode("a€").ids[:3])
    lm = language_model(tokenizer)
    assert lm.generate("") == "a" + INCOMPLETE == "".join(lm.stream(""))


def test_prompts_as_tokens(script):
    tokenizer = byte_level()
    tokenizer.encode_special_tokens = True  # as it is for documents
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    eot, a, b = tokenizer.token_to_id(EOT), *(tokenizer.token_to_id(c) for c in "ab")
    calls = script([eot], [eot], [eot])
    language_model(tokenizer).generate(["", f"a{EOT}b", "aba"])
    assert calls[0]["prompts"] == [[eot], [a, eot, b], [a, b, a]]
    assert (
        tokenizer.encode_special_tokens and tokenizer.truncation and tokenizer.padding
    )  # the caller's tokenizer is unchanged


@torch.no_grad()
def test_a_space_at_the_end_of_a_prompt_becomes_part_of_the_first_new_token():
    tokenizer = byte_level(330)  # has "Ġthe", "Ġspaces", ... and "Ġ" alone
    lm = language_model(tokenizer)
    space = [i for token, i in tokenizer.get_vocab().items() if token.startswith("Ġ")]
    assert len(space) > 3
    logits = lm.model(torch.tensor([tokenizer.encode("the").ids]))[0, -1]
    best = max(space, key=lambda i: logits[i])
    first = lm.generate("the ", 1, temperature=0)
    assert " " + first == tokenizer.decode([best])
    rows = lm.generate(["the ", "the"], 1, temperature=0)  # rows of a batch are independent
    assert rows == [first, tokenizer.decode([logits.argmax().item()])]
    assert "".join(lm.stream("the ", 9, seed=3)) == lm.generate("the ", 9, seed=3)


def test_a_space_that_begins_no_other_token_stays(script):
    tokenizer = TOKENIZERS["characters"]
    calls = script([0])
    language_model(tokenizer).generate("a ")
    assert calls[0]["prompts"] == [tokenizer.encode("a ").ids] and calls[0]["first"] is None


def test_ids_may_have_gaps(script):
    tokenizer = with_gaps()
    lm = LanguageModel(tiny_gpt(vocab_size=320, context_length=32), tokenizer)
    assert lm.n_ids == 301 and tokenizer.get_vocab_size() == 258
    lm.generate(
        ["", "a "], 40, temperature=5.0, top_k=None
    )  # one begins with id 300, one goes on with a space or with id 290
    calls = script([*tokenizer.encode("a").ids, 270, *tokenizer.encode("é").ids, 300, 299])
    assert lm.generate("x") == "aé" == "".join(lm.stream("x"))  # an id without a token decodes to nothing
    assert calls[0]["vocab_size"] == 301


def test_characters_without_a_token_are_named():
    lm = language_model(characters("abc def"))
    with pytest.raises(ValueError, match="the prompt has 'x', 'é', which the tokenizer does not know"):
        lm.generate(["abc", "axé x"])
    with pytest.raises(ValueError, match="'x'"):
        lm.stream("x")  # not only with the first piece


@pytest.mark.parametrize("stop", ["", ["a", ""], [3]])
def test_stop_strings_without_a_character_are_refused(stop):
    with pytest.raises(ValueError, match="stop=.* must be a text of at least one character"):
        language_model(TOKENIZERS["bytes"]).stream("a", stop=stop)


def test_sampling_values_are_checked_before_the_first_piece():
    with pytest.raises(ValueError) as error:
        language_model(TOKENIZERS["bytes"]).stream("a", temperature=-1, top_k=0)
    assert re.search("temperature=-1.*; top_k=0", message_of(error.value))


def test_model_and_tokenizer_must_match():
    tokenizer = TOKENIZERS["bytes"]
    with pytest.raises(ValueError, match="the tokenizer's 257 tokens exceed the model's vocab_size=256"):
        LanguageModel(tiny_gpt(vocab_size=256), tokenizer)
    with pytest.raises(ValueError, match="no token '</s>'"):
        LanguageModel(tiny_gpt(vocab_size=257), tokenizer, eot="</s>")
    lm = LanguageModel(tiny_gpt(vocab_size=320), tokenizer)  # padded
    with pytest.raises(ValueError, match="301 tokens exceed the model's vocab_size=300"):
        LanguageModel(tiny_gpt(vocab_size=300), with_gaps())
    assert lm.config.vocab_size == 320 and lm.tokenizer.to_str() == tokenizer.to_str()
