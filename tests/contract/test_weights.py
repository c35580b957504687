"""Weights in and out: folders of transformers, and checkpoints of nanoGPT. transformers computes in float64."""

from pathlib import Path

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer

from tests.contract.harness import BARE, run, summary
from tests.foreign import T, nanogpt_model, random_model, write_meta, write_nanogpt
from tril.model import load

IDS = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0}  # the tokenizer has 290 ids
MODERN = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, **IDS}
MODERN |= {"max_position_embeddings": T, "intermediate_size": 44, "rope_theta": 50.0, "rms_norm_eps": 0.1}
QWEN3 = MODERN | {"head_dim": 12, "tie_word_embeddings": True}
CONFIGS = {"gpt2": {"n_positions": T, "n_layer": 2, "n_embd": 32, "n_head": 4, **IDS}, "llama": MODERN, "qwen3": QWEN3}
FROZEN = [x for x in BARE if not x.startswith(("model", "data.tok", "callbacks"))]
FROZEN += "optim=adamw optim.lr=1e-30 trainer.max_steps=1 trainer.val_check_interval=1".split()


def read(folder: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder).double(), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def start(run_of, texts):
    """A function: the folder of a run that makes one step; the first text is for validation."""
    return lambda *settings: run_of(f"data.val_path={texts.parent}/00.txt", *settings, base=FROZEN)


@pytest.fixture(scope="module", params=CONFIGS)
def imported(request, once, texts, start):
    """A random model of transformers, its tokenizer, and the folder of a run that starts from both."""

    def make(folder: Path) -> None:
        random_model(request.param, **CONFIGS[request.param]).save_pretrained(folder)
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train(sorted(map(str, texts.parent.glob("*.txt"))), vocab_size=290, special_tokens=["<|endoftext|>"])
        tokenizer.save(str(folder / "tokenizer.json"))

    folder = once(request.param, make)
    return *read(folder), start(f"init_from=hf:{folder}")


@torch.no_grad()
def assert_same_logits(lm, model, n_ids: int = 290) -> None:
    """Within 32 roundings of the largest logit. Measured: 6, and 10 for transformers in float32 against float64."""
    ids = torch.randint(n_ids, (2, T), generator=torch.Generator().manual_seed(0))
    expected = model(ids).logits
    assert expected.dtype == torch.float64 and expected.std() > 0.5
    error = (lm.model(ids)[..., : expected.shape[-1]] - expected).abs().max()
    assert error <= 32 * torch.finfo(torch.float32).eps * expected.abs().max()


@torch.no_grad()
def test_a_model_of_transformers_is_the_same_in_tril_and_comes_back_unchanged(imported, start, texts, tmp_path):
    model, tokenizer, folder = imported
    lm, text = load(folder), (texts.parent / "00.txt").read_text()
    ids = torch.tensor([*tokenizer(text).input_ids, 0])
    assert lm.tokenizer.encode(text).ids == ids[:-1].tolist()
    assert_same_logits(lm, model)
    logits = torch.cat([model(window[None]).logits[0] for window in ids[:-1].split(T)])
    loss = torch.nn.functional.cross_entropy(logits, ids[1:]).item()
    assert summary(folder)["final_val_loss"] == pytest.approx(loss, rel=1e-6)  # where finetuning starts
    larger = load(start(f"init_from={folder}", "model.vocab_size=330"))
    added = larger.model(ids[None, :T])[0, :, 300:] - logits[:T, :290].mean(1, keepdim=True)
    assert added.shape == (T, 30) and added.abs().max() < 1e-5  # the logit of a new row is the mean logit of the tokens
    run("export", f"ckpt={folder}", f"out={tmp_path / 'again'}", cwd=tmp_path).succeeded()
    again, its_tokenizer = read(tmp_path / "again")
    assert_same_logits(lm, again)
    weights = again.state_dict()
    assert all(torch.equal(weights.pop(key), value) for key, value in model.state_dict().items()) and not weights
    assert its_tokenizer(text).input_ids == tokenizer(text).input_ids


@pytest.mark.parametrize("imported", ["llama"], indirect=True)
def test_weights_that_are_not_finite_are_refused_in_one_line(imported, start, tmp_path):
    model, tokenizer = random_model("llama", **MODERN), imported[1]
    model.model.embed_tokens.weight.data[295, 3] = torch.nan  # of a row that no text has, so that a run does not stop
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "hf")
    folder = start(f"init_from=hf:{tmp_path / 'hf'}")
    for command in ("sample", "evaluate", "heads"):
        run(command, f"ckpt={folder}", cwd=tmp_path).refused("weights that are not finite")


def test_a_checkpoint_of_nanogpt_without_biases_has_its_ids_and_logits_in_tril(start, texts, tmp_path):
    characters = "".join(sorted(set("".join(path.read_text() for path in texts.parent.glob("*.txt"))), reverse=True))
    model = nanogpt_model(len(characters))
    path = write_nanogpt(tmp_path / "ckpt.pt", model, bias=False)
    write_meta(tmp_path / "meta.pkl", characters)
    lm = load(start(f"init_from=nanogpt:{path}"))
    assert_same_logits(lm, model.double(), n_ids=len(characters))
    assert lm.tokenizer.encode("The dog").ids == [characters.index(character) for character in "The dog"]
