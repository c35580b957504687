"""Weights in and out of a run: a folder of transformers, which computes in float64, and a checkpoint of nanoGPT."""

import json

import pytest
import torch

from tests.contract.harness import BARE, run, summary
from tests.foreign import T, V, folder_of, nanogpt_model, write_meta, write_nanogpt
from tril.model import load

FILES = "certificate.json config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json"
FROZEN = [x for x in BARE if not x.startswith(("model", "data.tok", "callbacks"))]
FROZEN += "optim=adamw optim.lr=1e-30 trainer.max_steps=1 trainer.val_check_interval=1".split()


def read(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).double()


@pytest.fixture(scope="module")
def start(run_of, texts):
    """A function: the folder of a run that makes one step; the first text is for validation."""
    return lambda *settings: run_of(f"data.val_path={texts.parent}/00.txt", *settings, base=FROZEN)


@torch.no_grad()
def assert_same_logits(lm, model) -> None:
    """Within 32 roundings of the largest logit. Measured: 6, and 10 for transformers in float32 against float64."""
    ids = torch.randint(lm.tokenizer.get_vocab_size(), (2, T), generator=torch.Generator().manual_seed(0))
    ids %= model.config.vocab_size
    expected = model(ids).logits
    assert expected.dtype == torch.float64 and expected.std() > 0.5
    error = (lm.model(ids)[..., : expected.shape[-1]] - expected).abs().max()
    assert error <= 32 * torch.finfo(torch.float32).eps * expected.abs().max()


@torch.no_grad()
def test_a_model_of_transformers_is_the_same_in_a_run_and_comes_back_unchanged(once, start, texts, tmp_path):
    source = once("qwen3", lambda folder: folder_of("Qwen3", folder))
    model, folder = read(source), start(f"init_from=hf:{source}")
    lm = load(folder)
    assert_same_logits(lm, model)
    ids = torch.tensor([*lm.encode((texts.parent / "00.txt").read_text()), lm.eot_id])
    logits = torch.cat([model(window[None]).logits[0] for window in ids[:-1].split(T)])
    loss = torch.nn.functional.cross_entropy(logits, ids[1:]).item()
    assert summary(folder)["final_val_loss"] == pytest.approx(loss, rel=1e-6)  # where finetuning starts
    larger = load(start(f"init_from={folder}", "model.vocab_size=330"))
    added = larger.model(ids[None, :T])[0, :, V:] - logits[:T, :257].mean(1, keepdim=True)
    assert added.shape == (T, 66) and added.abs().max() < 1e-5  # the logit of a new row is the mean logit of the tokens
    (out := tmp_path / "again, in a folder").mkdir()
    done = run("export", f"ckpt={folder}", f"out={out.name}", cwd=tmp_path).succeeded()
    files = sorted(out.iterdir())
    assert " ".join(done.stdout.split()).startswith(f"{out}: Qwen3ForCausalLM, equal to ")
    assert [file.name for file in files] == FILES.split() and len({file.stat().st_mode for file in files}) == 1
    assert json.loads((out / "certificate.json").read_text()) == {"text": "none"}
    again = read(out)
    assert_same_logits(lm, again)
    weights = again.state_dict()
    assert all(torch.equal(weights.pop(key), value) for key, value in model.state_dict().items()) and not weights


def test_weights_that_are_not_finite_are_refused_in_one_line(once, start, tmp_path):
    def write(folder):
        model = read(folder_of("Llama", folder)).float()
        model.model.embed_tokens.weight.data[260, 3] = torch.nan  # of a row without a token, so that a run goes on
        model.save_pretrained(folder)

    folder = start(f"init_from=hf:{once('not finite', write)}")
    for command in ("sample", "evaluate", "heads"):
        run(command, f"ckpt={folder}", cwd=tmp_path).refused("weights that are not finite")


def test_a_checkpoint_of_nanogpt_without_biases_has_its_ids_and_logits_in_tril(start, texts, tmp_path):
    characters = "".join(sorted(set("".join(path.read_text() for path in texts.parent.glob("*.txt"))), reverse=True))
    model = nanogpt_model(len(characters))
    path = write_nanogpt(tmp_path / "ckpt.pt", model, bias=False)
    write_meta(tmp_path / "meta.pkl", characters)
    lm = load(start(f"init_from=nanogpt:{path}"))
    assert_same_logits(lm, model.double())
    assert lm.tokenizer.encode("The dog").ids == [characters.index(character) for character in "The dog"]
