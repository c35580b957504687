"""Initial weights of a GPT."""

import hashlib

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tril.model.config import GPTConfig


@torch.no_grad()
def init_weights(model: nn.Module, config: GPTConfig, seed: bytes) -> None:
    """Draws all parameters of a GPT, each from a random stream of `seed` and the parameter's name.

    The seed of a GPT is the state of torch's global generator when it is built. Two models of one seed have equal
    values in every parameter whose name, shape and distribution they share, so that a comparison of the two does not
    also compare two draws.

    | parameter                       | init=zero_out                     | init=gpt2 (Radford et al. 2019) |
    |---------------------------------|-----------------------------------|---------------------------------|
    | embed                           | normal, std 1 (tied: 0.02)        | normal, std 0.02                |
    | pos_embed                       | normal, std 0.02                  | normal, std 0.02                |
    | value_embed                     | normal, std 0.5                   | normal, std 0.5                 |
    | q, k, v; mlp up, gate           | uniform, std 0.5 / sqrt(C)        | normal, std 0.02                |
    | o_proj; mlp down                | 0: each block starts as identity  | normal, std 0.02 / sqrt(N)      |
    | head, untied                    | 0: the first loss is ln V         | normal, std 0.02                |
    | norm gains                      | 1                                 | 1                               |
    | biases                          | 0                                 | 0                               |
    | embed_factor; value_factor      | 0.1; 0                            | 0.1; 0                          |

    N is the number of branches that add to the residual stream: 2 L, or L where blocks have no attention or no FFN.
    """
    branches = config.n_layers * ((config.n_heads > 0) + (config.mlp != "none"))
    zero_out = config.init == "zero_out"
    for name, p in model.named_parameters():
        part, digest = name.split(".")[-2], hashlib.sha256(seed + name.encode()).digest()
        generator = None  # the meta device holds no values
        if not p.is_meta:
            generator = torch.Generator(p.device).manual_seed(int.from_bytes(digest[:8], "big"))
        if p.ndim < 2:
            nn.init.constant_(p, 0.1 if name.endswith("embed_factor") else 1.0 if name.endswith("weight") else 0.0)
        elif part in ("q_proj", "k_proj", "v_proj", "up", "gate") and zero_out:
            bound = 0.5 * (3 / config.dim) ** 0.5  # a uniform on +-b has std b / sqrt(3)
            nn.init.uniform_(p, -bound, bound, generator=generator)
        else:
            std = {
                "embed": 1.0 if zero_out and not config.tie_embeddings else 0.02,
                "head": 0.0 if zero_out else 0.02,
                "pos_embed": 0.02,
                "value_embed": 0.5,
                **dict.fromkeys(("q_proj", "k_proj", "v_proj", "up", "gate"), 0.02),
                **dict.fromkeys(("o_proj", "down"), 0.0 if zero_out else 0.02 / branches**0.5),
            }
            nn.init.normal_(p, std=std[part], generator=generator)  # KeyError: a parameter that the table does not list


class SkipInit(TorchFunctionMode):
    """Skips torch.nn.init where other weights follow: on the device meta, it would import torch's compiler."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
