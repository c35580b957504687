"""Tiny configs of classes of `transformers`: sizes, kinds of layers, and what the grid takes from them."""

import functools

import pytest
import torch
import transformers

from tests.conftest import assert_close
from tril.model.causality.grids.module_subject import NO_DECODING, NO_PADDING
from tril.model.causality.grids.tiny_configs import HEADS, POSITIONS, VOCABULARY, WINDOW, tiny_config
from tril.model.causality.grids.transformers_grid import (
    TransformersSubject,
    context_length,
    longest_input,
    model_cases,
    sees_whole_past,
)
from tril.model.causality.grids.transformers_loading import build
from tril.model.causality.subject import randomize


def test_sizes_by_the_names_of_fields():
    for name in ("LlamaForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM", "MambaForCausalLM"):
        config = tiny_config(getattr(transformers, name))
        assert config.vocab_size == VOCABULARY and config.num_hidden_layers == 2
        assert context_length(config) == POSITIONS  # also where the model has no limit
        assert name.startswith("Mamba") or config.num_attention_heads == HEADS
        ids = {key: value for key, value in config.to_dict().items() if key.endswith("_token_id")}
        assert all(value is None or value < VOCABULARY for value in ids.values()), ids


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("Gemma3ForCausalLM", ["sliding_attention", "full_attention"]),
        ("Qwen3NextForCausalLM", ["linear_attention", "full_attention"]),
        ("Zamba2ForCausalLM", ["linear_attention", "hybrid"] * 2),
    ],
)
def test_each_kind_of_layer_occurs(name, kinds):
    config = tiny_config(getattr(transformers, name))
    assert config.layer_types == kinds and getattr(config, "sliding_window", None) in (None, WINDOW)


def test_encoders_become_decoders_and_sub_configs_are_small():
    assert tiny_config(transformers.BertLMHeadModel).is_decoder
    text = tiny_config(transformers.Gemma3ForConditionalGeneration).get_text_config(decoder=True)
    assert (text.vocab_size, text.num_hidden_layers) == (VOCABULARY, 2)


def test_what_chooses_keys_need_not_see_its_whole_past():
    assert not sees_whole_past(tiny_config(transformers.DogeForCausalLM))
    assert not sees_whole_past(tiny_config(transformers.DeepseekV32ForCausalLM))
    assert sees_whole_past(tiny_config(transformers.DeepseekV3ForCausalLM))


def test_a_position_embedding_with_rows_for_padding_has_fewer_positions():
    model = build(tiny_config(transformers.RobertaForCausalLM), 0, model_class=transformers.RobertaForCausalLM)
    assert model.roberta.embeddings.position_embeddings.padding_idx == 0
    assert longest_input(model) == POSITIONS - 1
    bert = build(tiny_config(transformers.BertLMHeadModel), 0, model_class=transformers.BertLMHeadModel)
    assert longest_input(bert) == POSITIONS


def test_a_class_that_refuses_dropout_is_tested_in_training_mode_without():
    labels = []
    for name in ("DiffLlamaForCausalLM", "LlamaForCausalLM"):
        model_class = getattr(transformers, name)
        cases = model_cases(name, build(tiny_config(model_class), 0, model_class=model_class), precisions=("32-true",))
        labels.append({key for case in cases for key in case.labels if key in ("dropout", "training")})
    assert labels == [{"training"}, {"dropout"}]


@pytest.mark.parametrize("name", ["MambaForCausalLM", "RwkvForCausalLM", "GraniteMoeForCausalLM", "BloomForCausalLM"])
def test_the_cache_has_several_names(name):
    model_class = getattr(transformers, name)
    model = randomize(build(tiny_config(model_class), 0, model_class=model_class))
    subject = TransformersSubject(model)
    ids = torch.randint(1, VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        decoded = subject.decode(ids, [5] + [1] * 7)
        assert decoded is not None and subject.note == ""
        assert_close(decoded, subject(ids))


def test_a_cache_or_padding_that_raises_is_a_note(monkeypatch):
    forward = transformers.LlamaForCausalLM.forward

    @functools.wraps(forward)
    def only_plain(self, *args, attention_mask=None, cache=None, use_cache=None, **inputs):
        if attention_mask is not None or use_cache:
            raise NotImplementedError("plain passes\nonly")
        return forward(self, *args, use_cache=False, **inputs)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", only_plain)
    model = build(tiny_config(transformers.LlamaForCausalLM), 0, model_class=transformers.LlamaForCausalLM)
    subject = TransformersSubject(model)
    ids = torch.ones(2, 4, dtype=torch.long)
    assert subject.decode(ids, [2, 2]) is None and subject.padded(ids, [0, 1]) is None
    why = "where LlamaForCausalLM ends in NotImplementedError: plain passes only"
    assert subject.note == f"{NO_DECODING}, {why}; {NO_PADDING}, {why}"
