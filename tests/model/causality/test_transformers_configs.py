"""Windows, lengths and recurrences from a `transformers` config, and the messages for models that cannot be loaded."""

import json
import sys

import pytest
import transformers

from tests.model.causality.test_transformers_grid import FAMILIES, config
from tril.model.causality.case import lengths_to_test
from tril.model.causality.grids.transformers_grid import context_length, sees_whole_past, transformers_cases, windows


@pytest.mark.parametrize(
    "family, changes, expected",
    [
        ("gpt2", {}, [None] * 3),
        ("mistral", {}, [8, 8]),
        ("mistral", {"sliding_window": None}, [None, None]),
        ("qwen3", {"sliding_window": 8}, [None, None]),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, [None, 8]),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, [8, 8]),
        ("gemma2", {}, [8, None]),
    ],
)
def test_windows_are_read_where_they_apply(family, changes, expected):
    assert windows(config(family, **changes)) == expected


@pytest.mark.parametrize(
    "family, changes, expected",
    [
        ("gpt2", {}, [1, 2, 37, 48]),
        ("gpt2", {"n_positions": 20}, [1, 2, 20]),
        ("gpt2", {"n_positions": 1024}, [1, 2, 37, 256]),
        ("mistral", {}, [1, 2, 8, 9, 37, 48]),
        ("mistral", {"sliding_window": 100, "max_position_embeddings": 1 << 20}, [1, 2, 37, 100, 101, 256]),
        ("mistral", {"sliding_window": 4096, "max_position_embeddings": 1 << 20}, [1, 2, 37, 256]),
    ],
)
def test_lengths_around_a_window_and_no_longer_than_the_context(family, changes, expected):
    made = config(family, **changes)
    assert lengths_to_test(context_length(made), windows(made)) == expected and context_length(made) == expected[-1]


def test_recurrences_need_not_see_their_whole_past():
    assert all(sees_whole_past(config(family)) for family in FAMILIES)
    assert not sees_whole_past(transformers.MambaConfig())
    for kinds, all_of_it in ((["linear_attention", "full_attention"], True), (["linear_attention"] * 2, False)):
        assert sees_whole_past(transformers.Qwen3NextConfig(num_hidden_layers=2, layer_types=kinds)) == all_of_it


@pytest.mark.parametrize(
    "name, message",
    [
        ("nothing.json", "does not exist; name a folder written by save_pretrained, a config, or a model on the hub"),
        ("./nothing", "does not exist; name a folder"),
        ("/no/such/folder", "does not exist; name a folder"),
        (".", "is a folder without config.json"),
        ("t5.json", "cannot be loaded: transformers has no causal language model for model_type=t5; name another"),
        ("unknown.json", "cannot be loaded: The checkpoint you are trying to load has model type `unknown`"),
        ("heads.json", "cannot be loaded: `embed_dim` must be divisible by num_heads (got `embed_dim`: 30"),
        ("broken.json", "cannot be loaded: It looks like the config file at 'broken.json' is not a valid JSON file."),
        (
            "backbone",
            "cannot be loaded: there are no weights for lm_head.weight of LlamaForCausalLM; save the whole model",
        ),
    ],
)
def test_user_errors_are_one_line(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    configs = {
        "t5": {"model_type": "t5"},
        "unknown": {"model_type": "unknown"},
        "heads": {"model_type": "gpt2", "n_embd": 30, "n_head": 4},
    }
    for stem, content in configs.items():
        (tmp_path / f"{stem}.json").write_text(json.dumps(content))
    (tmp_path / "broken.json").write_text("{")
    if name == "backbone":
        transformers.AutoModel.from_config(config("llama")).save_pretrained(name)
    with pytest.raises((ValueError, OSError)) as caught:
        transformers_cases(name)
    assert str(caught.value).startswith(f"hf={name} {message}") and len(str(caught.value).splitlines()) == 1


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    config("gpt2").save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="needs the library transformers; pip install transformers"):
        transformers_cases(str(tmp_path))
