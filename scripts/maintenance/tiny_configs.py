"""A tiny config with initial weights for every causal language model of `transformers`.

Sizes follow from the names of a config's fields, and are the same for all classes; `OVERRIDES` holds what these rules
cannot know. Layers are chosen so that each kind of layer of the default config occurs.
"""

import dataclasses
import itertools
import re
from typing import Any

VOCABULARY, POSITIONS = 67, 64  # V is no multiple of any block size
WIDTH, HEADS, HEAD_SIZE, WINDOW = 32, 4, 8, 8
MIN_LAYERS, MAX_LAYERS = 2, 6
RULES = {  # pattern of the whole name of an integer field -> its value; the first match counts
    r"(unpadded_)?vocab_size(_per_layer_input)?|(shape|pronunciation)_vocab_size": VOCABULARY,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|model_max_length|max_target_positions"
    r"|original_max_position_embeddings|max_text_tokens": POSITIONS,
    r"(input_|output_)?embedding_size|hidden_size|d_model|n_embd|emb_dim|embedding_dim|word_embed_proj_dim"
    r"|backbone_hidden_size|hidden_size_global|attention_hidden_size|lru_width|hidden_size_per_layer_input": WIDTH,
    r".*intermediate_size(_mlp)?|(.*_)?ffn_(hidden_size|dim)|dff|dim_ff|d_inner|feed_forward_size": 2 * WIDTH,
    r"(num_)?((hidden|encoder|decoder)_)?layers|n_layers?|num_blocks|num_layers_per_stack": MIN_LAYERS,
    r"attn_layer_period|expert_layer_period": 2,
    r"attn_layer_offset|expert_layer_offset": 1,
    r"mamba_(n|num)_heads|n_mamba_heads": 2 * HEADS,
    r"mamba_n_?groups|n_groups": 1,
    r"mamba_d_ssm": 2 * WIDTH,
    r".*num_key_value_heads|num_kv_heads|num_query_groups": HEADS // 2,
    r"index_n_heads": 4 * HEADS,  # a sum of few ReLUs is often 0, and equal scores are chosen by their number
    r"(.*_)?attention_heads|num_heads|n_heads?|linear_num_(\w+_)?heads": HEADS,
    r"qk_head_dim": 2 * HEAD_SIZE,
    r".*head_(dim|size)|mamba_d_head|mamba_headdim|d_head|dim_head|kv_channels|rotary_dim": HEAD_SIZE,
    r"sliding_window(_size)?|attention_window_size|window_size|local_attention|attention_chunk_size"
    r"|(mamba_)?chunk_size|index_topk|index_block_size|keep_window_size": WINDOW,
    r"index_topk_blocks|zero_expert_num": 2,
    r"(n_routed|num_local|moe_num|num)_experts": 4,
    r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k": 2,
    r"n_group|topk_group|num_expert_group": 1,
    r"(q|kv|o)_lora_rank": 16,
}
# Fields that no class runs without, although their default is None.
UNSET = r"head_dim|num_key_value_heads|.*experts.*|moe_intermediate_size"


def causal_classes() -> list[str]:
    """Names of all classes of the installed `transformers` that are causal language models."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as MAPPING

    listed = [name for names in MAPPING.values() for name in ([names] if isinstance(names, str) else names)]
    exported = [name for name in dir(transformers) if name.endswith("ForCausalLM") and not name.startswith("Auto")]
    return sorted({*listed, *exported}, key=str.lower)


def tiny_config(model_class: Any) -> Any:
    """The config of a small model with all kinds of layers of the default one."""
    return _tiny(model_class.config_class)


def _tiny(config_class: Any) -> Any:
    overrides = OVERRIDES.get(config_class.__name__, {})
    first, values = config_class(), dict[str, Any]()
    # The constructor derives the other attributes.
    fields = {field.name for field in dataclasses.fields(first)} | set(first.attribute_map.values())
    next_token = itertools.count(VOCABULARY - 1, -1)
    for name, value in ((name, value) for name, value in vars(first).items() if name in fields):
        sized = isinstance(value, int) and not isinstance(value, bool)
        if hasattr(value, "to_dict"):  # a config of its own, such as that of the text
            values[name] = _tiny(type(value))
        elif name == "pad_token_id" and sized:
            values[name] = 0
        elif name.endswith("_token_id") and sized and value >= VOCABULARY:
            values[name] = next(next_token)
        elif (sized or value is None and re.fullmatch(UNSET, name)) and (size := _size(name)) is not None:
            values[name] = size
    if hasattr(first, "qk_rope_head_dim"):  # its latent keys have as many heads as the queries
        values["num_key_value_heads"] = HEADS
    if hasattr(first, "expand") and "num_heads" in values:  # Mamba 2
        values["num_heads"] = 2 * HEADS
    if not any(_size(name) == POSITIONS for name in values):  # the sweep's limit where the model has none
        values["seq_length"] = POSITIONS
    values |= _layers(first) | overrides
    if getattr(first, "is_decoder", None) is False and not first.is_encoder_decoder:
        values["is_decoder"] = True  # an encoder unless told otherwise
    return config_class(**values)


def _size(name: str) -> int | None:
    return next((size for pattern, size in RULES.items() if re.fullmatch(pattern, name)), None)


def _layers(config: Any) -> dict[str, Any]:
    """Lists with an entry for each layer, shortened to one layer of each kind."""
    number = getattr(config, "num_hidden_layers", None)
    lists = {k: v for k, v in vars(config).items() if isinstance(v, list) and number and len(v) == number > 1}
    if not lists:
        return {}
    kinds = list(zip(*(map(str, v) for v in lists.values()), strict=True))
    chosen = sorted({kinds.index(kind) for kind in kinds})[:MAX_LAYERS]
    chosen = chosen if len(chosen) >= MIN_LAYERS else [0, 1]
    short = {name: [v[i] for i in chosen] for name, v in lists.items()}
    return {"num_hidden_layers": len(chosen)} | short


SHARED_KEYS = {  # the last two of four layers use the keys and values of the first two
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
HYBRID = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
OVERRIDES: dict[str, dict[str, Any]] = {  # by config class
    "BambaConfig": {"attn_layer_indices": [1]},
    "BigBirdConfig": {"attention_type": "original_full"},  # what a decoder needs
    "BltConfig": {"encoder_hash_byte_group_vocab": 101},
    "CohereCompassTextConfig": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": None,
        }
    },
    "CsmDepthDecoderConfig": {"num_codebooks": POSITIONS},
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "DeepseekV4Config": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": WINDOW}},
    "Dots1Config": {"n_shared_experts": 1},
    "Dots3NoteTextConfig": {
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": HEADS,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 2 * HEAD_SIZE,
        "swa_qk_nope_head_dim": HEAD_SIZE,
        "swa_v_head_dim": HEAD_SIZE,
    },
    "Gemma3nTextConfig": SHARED_KEYS | {"activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "intermediate_size": 64},
    "Gemma4TextConfig": {"global_head_dim": 2 * HEAD_SIZE},
    "Gemma4UnifiedTextConfig": {"global_head_dim": 2 * HEAD_SIZE},
    "GraniteMoeHybridConfig": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "HrmTextConfig": {"num_hidden_layers": 2, "num_layers_per_stack": None},
    "JambaConfig": {"num_hidden_layers": 4},
    "Lfm2MoeConfig": {"num_hidden_layers": 2, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "MusicgenDecoderConfig": {"num_codebooks": 1},
    "MusicgenMelodyDecoderConfig": {"num_codebooks": 1},
    "ProphetNetConfig": {"max_position_embeddings": POSITIONS + 2, "seq_length": POSITIONS},  # its streams look ahead
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 4 * HEADS,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_SIZE,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "ReformerConfig": {
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [WIDTH // 2, WIDTH // 2],
        "lsh_attn_chunk_length": WINDOW,
        "local_attn_chunk_length": WINDOW,
        "num_buckets": 4,
        "attn_layers": ["local", "lsh"],
        "is_decoder": True,
    },
    "xLSTMConfig": {"hidden_size": 4 * WIDTH, "embedding_dim": 4 * WIDTH},  # its head sizes are multiples of 64 / heads
    "XLMConfig": {"causal": True},  # an encoder unless told otherwise
    "XLNetConfig": {"attn_type": "uni"},  # by default, all permutations of a text
    "XmodConfig": {"default_language": "en_XX"},
    "Zamba2Config": HYBRID,
    "ZambaConfig": HYBRID
    | {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * HEAD_SIZE, "n_mamba_heads": 2},
    "ZayaConfig": {"num_experts_per_tok": 1},
}
