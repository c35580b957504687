"""What users of nanoGPT, litgpt and Hugging Face transformers type, and the settings that they mean."""

from collections.abc import Collection

SETTINGS = {
    "model.context_length": "block_size context_length context_size seq_len seq_length sequence_length max_seq_len "
    "max_seq_length max_length n_ctx n_positions max_position_embeddings context",
    "model.dim": "n_embd d_model hidden_size embed_dim embedding_dim emb_dim n_embed dim model_dim width",
    "model.n_layers": "n_layer n_layers num_layers num_hidden_layers n_blocks depth layers",
    "model.n_heads": "n_head n_heads num_heads num_attention_heads heads nhead",
    "model.n_kv_heads": "n_kv_head n_kv_heads num_kv_heads num_key_value_heads n_query_groups",
    "model.head_dim": "head_size head_dim d_head d_k",
    "model.mlp_hidden": "intermediate_size ffn_dim d_ff n_inner dim_feedforward",
    "model.mlp": "activation activation_function hidden_act mlp_class_name",
    "model.norm": "norm_class_name normalization",
    "model.norm_eps": "rms_norm_eps layer_norm_eps layer_norm_epsilon",
    "model.pos": "position_embedding position_embeddings pos_emb positional_encoding",
    "model.rope_base": "rope_theta rope_base",
    "model.tie_embeddings": "tie_word_embeddings weight_tying tie_weights",
    "model.window": "sliding_window sliding_window_size attention_window",
    "model.resid_dropout": "dropout resid_pdrop residual_dropout hidden_dropout",
    "model.attn_dropout": "attn_pdrop attention_dropout",
    "model.embd_dropout": "embd_pdrop embedding_dropout",
    "model.vocab_size": "vocab_size padded_vocab_size n_vocab",
    "model.bias": "bias",
    "model.checkpoint_activations": "gradient_checkpointing activation_checkpointing",
    "data.batch_size": "batch_size micro_batch_size per_device_train_batch_size train_batch_size bs",
    "data.val_batch_size": "eval_batch_size val_batch_size per_device_eval_batch_size",
    "data.path": "path file input_file train_file data_dir data_path text_file",
    "data.tokenizer.kind": "tokenizer tokenizer_name tokenizer_kind",
    "data": "dataset dataset_name",
    "optim.lr": "learning_rate lr max_lr",
    "optim.weight_decay": "weight_decay wd",
    "optim.betas": "beta1 beta2 betas adam_beta1 adam_beta2",
    "optim": "optimizer optimizer_type",
    "optim.schedule.warmup_steps": "warmup_iters warmup_steps lr_warmup_steps num_warmup_steps warmup",
    "optim.schedule.min_lr_ratio": "min_lr min_lr_rate",
    "optim.schedule.kind": "lr_scheduler_type lr_schedule scheduler decay_lr",
    "trainer.max_steps": "max_iters max_steps n_steps num_steps steps iterations n_iters num_train_steps num_epochs "
    "n_epochs epochs max_epochs num_train_epochs",
    "trainer.max_time": "max_time max_seconds time_limit",
    "trainer.accumulate_grad_batches": "gradient_accumulation_steps gradient_accumulation_iters grad_accum_steps "
    "accumulate_grad_batches grad_accum",
    "trainer.gradient_clip_val": "grad_clip max_grad_norm gradient_clip_val max_norm clip_grad",
    "trainer.val_check_interval": "eval_interval eval_steps eval_every val_check_interval validate_every",
    "trainer.log_every_n_steps": "log_interval logging_steps log_every log_every_n_steps",
    "trainer.accelerator": "device accelerator",
    "trainer.devices": "devices gpus num_gpus n_gpus num_devices world_size",
    "trainer.precision": "dtype precision bf16 fp16 amp",
    "checkpoint.every_n_steps": "save_steps save_interval save_every checkpoint_interval",
    "hydra.run.dir": "out_dir out output output_dir save_dir run_dir log_dir",
    "logger": "wandb use_wandb wandb_log report_to loggers",
    "logger.wandb.project": "wandb_project project",
    "resume": "resume_from resume_from_checkpoint ckpt ckpt_path checkpoint_path load",
    "init_from": "pretrained pretrained_model model_name_or_path from_pretrained init_checkpoint",
    "seed": "random_seed manual_seed",
    "compile": "torch_compile",
    "n": "num_samples n_samples num_return_sequences",
    "prompt": "start input text prefix",
    "max_new_tokens": "max_tokens num_tokens length max_gen_len",
    "temperature": "temp",
    "top_k": "topk",
    "top_p": "topp",
}
KNOWN = {name: setting for setting, names in SETTINGS.items() for name in names.split()}


def meant(key: str, settings: Collection[str]) -> str | None:
    """The setting that another project calls `key`, such as `n_embd` or `model.hidden_size`; None: no such name.

    Args:
        settings: dotted names of those that exist.
    """
    name = key.rpartition(".")[2].replace("-", "_").lower()
    setting = KNOWN.get(name)
    return setting if setting in settings and setting != key else None
