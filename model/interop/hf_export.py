"""Writes any model as a folder of `transformers`. The folder gets its name after `transformers` has computed the same.

GPT-2, Llama and Qwen3 need no code of Tril. Any other model gets `modeling_tril.py`, which imports it.
"""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tril.data.settings import one_line
from tril.model.atomic_files import write_json
from tril.model.causality.interface import quiet
from tril.model.checkpoint import Checkpoint, verdict
from tril.model.generation.language_model import LanguageModel
from tril.model.gpt import GPTConfig
from tril.model.interop.architectures import HEAD, HUGGING_FACE, write_config, write_weights
from tril.model.interop.hf import CONFIG, OWN, OWN_PREFIX, TOKENIZER, TOKENIZER_CONFIG, WEIGHTS

CODE, OWN_CLASS = Path(__file__).with_name("modeling_tril.py"), "TrilForCausalLM"
LIMIT = 1e-4  # on the difference of logits in float32
RELATIVE_LIMIT = 1e-5  # of the largest logit, where that is more: rounding grows with it


def export_hf(folder: Path, checkpoint: Checkpoint) -> str:
    """Writes a new folder for AutoModelForCausalLM and AutoTokenizer.

    Args:
        folder: new or empty.

    Returns:
        The class of the model.

    Raises:
        OSError: it cannot be written.
        ValueError: weights are not finite, a library is missing, or `transformers` computes something else; nothing is
            written.
    """
    lm, certificate = checkpoint.language_model(), verdict(checkpoint)
    lm.check_finite(checkpoint.path)
    try:
        quiet()
    except ImportError as error:
        raise ValueError('to=hf needs transformers, which compares the folder; pip install -e ".[hf]"') from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".export-", dir=folder.parent) as temporary:
        part = Path(temporary) / folder.name
        part.mkdir()
        class_name = write_hf(part, lm)
        write_json(part / "certificate.json", (checkpoint.certificate or {}) | {"text": certificate})
        check_equal(part, lm)
        part.replace(folder)
    return class_name


def write_hf(folder: Path, lm: LanguageModel) -> str:
    """Writes the model and the tokenizer into an existing folder; returns the class of the model.

    Raises:
        OSError: it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if (values := write_config(lm.config)) is not None:
        weights = write_weights(HUGGING_FACE[values["model_type"]], lm.model)
    else:
        values, state = own_config(lm.config), lm.model.state_dict()
        if lm.config.tie_embeddings:
            del state[HEAD]
        weights = {OWN_PREFIX + name: tensor.float().cpu().contiguous() for name, tensor in state.items()}
        shutil.copyfile(CODE, folder / CODE.name)
    special = {"bos_token_id": lm.eot_id, "eos_token_id": lm.eot_id}
    config: dict[str, Any] = values | special | {"torch_dtype": "float32"}
    generation: dict[str, Any] = special | {"pad_token_id": lm.eot_id, "do_sample": True}
    if lm.n_ids < lm.config.vocab_size:  # rows of a padded embedding, which no text has
        generation["suppress_tokens"] = list(range(lm.n_ids, lm.config.vocab_size))
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # takes all of tokenizer.json, without rules of its own
        **{f"{name}_token": lm.eot for name in ("eos", "bos", "pad")},
        "model_max_length": lm.config.context_length,
        "clean_up_tokenization_spaces": False,
    }
    for name, content in ((CONFIG, config), ("generation_config.json", generation), (TOKENIZER_CONFIG, tokenizer)):
        write_json(folder / name, content)
    (folder / TOKENIZER).write_text(lm.tokenizer.to_str(pretty=True), encoding="utf-8")
    try:
        save_file(weights, folder / WEIGHTS, {"format": "pt"})
    except SafetensorError as error:  # which is no OSError
        raise OSError(one_line(f"cannot write {folder / WEIGHTS}: {error}")) from error
    (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode)  # safetensors lets nobody else read the file
    return config["architectures"][0]


def own_config(config: GPTConfig) -> dict[str, Any]:
    """The config.json of a model that no class of `transformers` expresses; other programs know the standard keys."""
    return {
        "model_type": OWN,
        "architectures": [OWN_CLASS],
        "auto_map": {"AutoConfig": "modeling_tril.TrilConfig", "AutoModelForCausalLM": f"modeling_tril.{OWN_CLASS}"},
        "gpt": config.to_dict(),
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "num_hidden_layers": config.n_layers,
        "hidden_size": config.dim,
        "num_attention_heads": config.n_heads,
        "tie_word_embeddings": config.tie_embeddings,
    }


@torch.no_grad()
def check_equal(folder: Path, lm: LanguageModel) -> None:
    """Compares the logits at all positions of a full context, and the ids of a text.

    Raises:
        ValueError: `transformers` cannot load the folder, or computes something else than `lm`.
    """
    import transformers

    from tril.model.interop.modeling_tril import TrilForCausalLM

    loader: Any = TrilForCausalLM if (folder / CODE.name).is_file() else transformers.AutoModelForCausalLM
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, **options)
        model = loader.from_pretrained(folder, **options, dtype=torch.float32).eval()
    except Exception as error:  # transformers raises many kinds, with many lines
        raise ValueError(one_line(f"not exported: transformers cannot load the folder ({error})")) from error
    length, generator = lm.config.context_length, torch.Generator().manual_seed(0)
    ids = torch.randint(lm.n_ids, (2, length), generator=generator)  # (B, T)
    ours = lm.model(ids)  # (B, T, V)
    error = (ours - model(ids).logits).abs().max().item()
    limit = max(LIMIT, RELATIVE_LIMIT * ours.abs().max().item())
    if not error <= limit:  # a NaN fails as well
        raise ValueError(
            f"not exported: the logits of transformers differ by {error:.3g}, and the limit is {limit:.3g}"
        )
    text = lm.tokenizer.decode(torch.randperm(lm.n_ids, generator=generator).tolist(), skip_special_tokens=False)
    if tokenizer(text, add_special_tokens=False).input_ids != lm.tokenizer.encode(text, add_special_tokens=False).ids:
        raise ValueError("not exported: the tokenizer of transformers gives other ids for the same text")
