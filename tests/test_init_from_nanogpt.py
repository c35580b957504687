"""init_from=nanogpt:FILE: a run that starts from a checkpoint of nanoGPT, its tokenizer, and its certificate."""

import torch
import yaml

from tests.calls import call
from tests.conftest import assert_refused
from tests.model.interop.folders import EOT, byte_tokenizer
from tests.model.interop.nanogpt_files import reference, write_checkpoint, write_meta
from tests.test_init_from import train, weights_at_start
from tril.model.checkpoint import load, read_state
from tril.model.interop.nanogpt import read_nanogpt


def characters_of_the_text(text) -> str:
    return "".join(sorted(set(text.read_text(encoding="utf-8"))))


def test_a_model_of_characters_is_trained_and_certified(tmp_path, text, monkeypatch):
    characters = characters_of_the_text(text)
    model = reference(len(characters))
    path = write_checkpoint(tmp_path / "nano" / "ckpt.pt", model)
    write_meta(tmp_path / "nano" / "meta.pkl", characters)
    found = weights_at_start(tmp_path, text, monkeypatch, f"init_from=nanogpt:{path}", "trainer.max_steps=2")
    expected = read_nanogpt(path).language_model().model.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert torch.equal(found["embed.weight"][:-2], model.transformer.wte.weight)
    content = read_state(tmp_path / "run" / "checkpoints" / "last.ckpt")
    entry, trained = content["tril"], load(tmp_path / "run")
    assert (entry["lineage"]["source"], entry["lineage"]["step"]) == (str(path), 2000)
    assert entry["certificate"]["passed"] is True and content["global_step"] == 2
    assert not torch.equal(trained.model.embed.weight, expected["embed.weight"])
    # A character is a token, each document has an end, and no character is unknown.
    counts = entry["data"]["counts"]["train"]
    assert counts["tokens"] == counts["bytes"] + counts["documents"] and counts["unknown"] == 0
    assert trained.encode("line 1") == [characters.index(c) for c in "line 1"]

    from tril.scripts.sample import main

    done = call(main, "ckpt=run", "prompt=line 1", "max_new_tokens=4", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("line 1")


def test_without_a_table_the_user_names_the_tokenizer(tmp_path, text):
    path = write_checkpoint(tmp_path / "nano" / "ckpt.pt", reference(264))
    (tmp_path / "gpt2.json").write_text(byte_tokenizer().to_str(), encoding="utf-8")
    before = sorted(path.name for path in tmp_path.iterdir())
    done = train(tmp_path, text, f"init_from=nanogpt:{path}")
    message = "has no meta.pkl, so its tokens are those of GPT-2; name its tokenizer with data.tokenizer.kind=file"
    assert_refused(done, f"{path}: it {message}")
    arguments = [f"init_from=nanogpt:{path}", "data.tokenizer.kind=file"]
    assert_refused(train(tmp_path, text, *arguments, "data.tokenizer.path=nothing.json"), "path=nothing.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == before

    done = train(tmp_path, text, *arguments, "data.tokenizer.path=gpt2.json", "trainer.max_steps=2")
    assert done.returncode == 0, done.stderr
    trained, settings = load(tmp_path / "run"), yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (trained.n_ids, trained.config.vocab_size, trained.eot) == (257, 264, EOT)
    [copy] = (tmp_path / "cache" / "taken_over").glob("*.json")
    assert settings["data"]["tokenizer"]["path"] == str(copy) and "init_from" not in settings


def test_with_a_table_another_tokenizer_and_another_model_are_refused(tmp_path, text):
    characters = characters_of_the_text(text)
    path = write_checkpoint(tmp_path / "ckpt.pt", reference(len(characters)))
    write_meta(tmp_path / "meta.pkl", characters)
    source = f"init_from=nanogpt:{path}"
    done = train(tmp_path, text, source, "data.tokenizer.kind=byte")
    assert_refused(done, f"data.tokenizer.kind=byte does not go with {source}; leave it out")
    assert_refused(train(tmp_path, text, source, "model.dim=64"), "model.dim=64 must be 32")
    assert_refused(train(tmp_path, text, "init_from=nanogpt:nothing.pt"), "nothing.pt")
    assert_refused(train(tmp_path, text, "init_from=nanogpt:text.txt"), "text.txt is damaged, or is not a checkpoint")
