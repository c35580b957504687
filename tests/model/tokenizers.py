"""Tokenizers of the tests."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

EOT = "<|endoftext|>"
TEXT = "naïve café – 東京タワー, 😀👩‍👩‍👧 and 𝔘𝔫𝔦𝔠𝔬𝔡𝔢;\ttabs\n\n  and spaces"


def byte_tokenizer(*extra_tokens: str) -> Tokenizer:
    """One token for each byte, and the end-of-text token with the id 256."""
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (EOT, *extra_tokens)])
    return tokenizer


def merging_tokenizer() -> Tokenizer:
    """Byte-level BPE of 330 tokens with merges across parts of characters, such as "Ġthe"."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = {"special_tokens": [EOT], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=330, show_progress=False, min_frequency=1, **options)
    tokenizer.train_from_iterator([TEXT, "東亰 西京 😁😂 the the then"] * 3, trainer)
    return tokenizer
