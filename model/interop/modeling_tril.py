"""Any model of Tril as a class of `transformers`. `scripts/export.py` copies this file next to the weights.

AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)  # where tril is installed
"""

from typing import Any

import torch
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from tril.model.gpt import GPT, GPTConfig
from tril.model.positions import Positions

# The name of the cache changes between versions of `transformers`.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class TrilConfig(PretrainedConfig):
    model_type = "tril"


class TrilForCausalLM(PreTrainedModel, GenerationMixin):
    """Logits of a GPT, with its KV cache, and prompts that are padded on the left by an attention mask."""

    config_class = TrilConfig
    _tied_weights_keys = {"model.head.weight": "model.embed.weight"}  # if config.tie_word_embeddings

    def __init__(self, config: TrilConfig):
        super().__init__(config)
        self.model = GPT(GPTConfig(**config.gpt))
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        if isinstance(module, Positions) and (tables := list(module.buffers())):  # which are in no file
            with tables[0].device:
                module.make_tables()

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.model.embed

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.model.head

    def forward(self, input_ids, attention_mask=None, use_cache=None, labels=None, **kwargs):
        cache = kwargs.get(CACHE)
        if cache is None and use_cache and self.model.config.causal:
            cache = self.model.new_cache(len(input_ids))
        mask = positions = None
        if attention_mask is not None and not attention_mask.all():
            mask = attention_mask[:, None, None].bool()  # (B, 1, 1, S)
            positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]  # (B, T)
        logits = self.model(input_ids, cache=cache, mask=mask, positions=positions)  # (B, T, V)
        loss = None if labels is None else self.loss_function(logits, labels, self.model.config.vocab_size)
        output: dict[str, Any] = {"loss": loss, "logits": logits, CACHE: cache}
        return CausalLMOutputWithPast(**output)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `forward` makes the cache

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        cache = kwargs.get(CACHE)
        return kwargs | {"input_ids": input_ids if cache is None else input_ids[:, cache.length :]}

    def _reorder_cache(self, cache, beam_idx):
        for tensor in (*cache.keys, *cache.values):
            tensor.copy_(tensor[beam_idx])
        return cache
