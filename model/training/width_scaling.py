"""Learning rates and initial values that transfer over the width of a model: optim.scale_with_width.

The rules are those of the maximal update parametrization, muP (Yang et al. 2021, Tensor Programs V, table 8), in the
spectral form of Yang, Simon and Bernstein 2023 for Muon. The rates are tuned on a base model of width `base_width`
whose heads have size `base_head_dim`. With r = dim / base_width, a matrix in a block has n times the inputs and m times
the outputs of the base model's; both are r, but for the heads, where they are H * D / base_width:

| parameter                  | AdamW's rate                                  | initial std or value     |
|----------------------------|-----------------------------------------------|--------------------------|
| matrix in a block          | / n; Muon: spectral norm * sqrt(m / n)        | / sqrt(n)                |
| embeddings, head, factors  | as the base                                   | as the base              |
| last norm                  | / r                                           | / r                      |
| q_norm; without it q_proj  | also * sqrt(base_head_dim / D)                | also the same            |
| other norms, biases        | as the base                                   | as the base              |

The last norm's gain is muP's output multiplier: under Adam, a gain that starts at 1/r and learns at 1/r of the rate is
a gain that starts at 1 in front of a fixed factor of 1/r (Yang et al. 2021, lemma J.1). One matrix can thus be
embedding and head, with the values and the rate of an embedding, and the model has the parameters and operations of any
other. The gain or weight of q is in the same way the factor that turns the scores q k / sqrt(D) into muP's
q k sqrt(base_head_dim) / D: training aligns q with k, and aligned vectors of D numbers have scores of sqrt(D), with
`qk_norm` as well as without it. AdamW decays by rate * weight_decay, so its decay of the blocks falls with 1/n too, as
Qiu et al. 2025 recommend (https://arxiv.org/abs/2512.05620). Depth, batch and length of training are not scaled.
"""

import math

import torch
from torch import Tensor

from tril.model.config import GPTConfig
from tril.model.gpt import GPT
from tril.model.training.optim import lr_ratio
from tril.model.training.settings import OptimConfig

DIGITS = 12  # of a factor: rounding errors would split parameters of equal rates into several groups


def rate_factor(name: str, parameter: Tensor, config: GPTConfig, base: OptimConfig, by_muon: bool) -> float:
    """The learning rate of a parameter, relative to that of its group in the base model.

    Args:
        name: of the parameter in the GPT.
        by_muon: Muon updates it, and multiplies its rate by `lr_ratio`; otherwise AdamW.
    """
    factor, inputs, outputs = relative_sizes(name, parameter, config, base)
    if by_muon:
        rows, columns = parameter.shape
        wanted = lr_ratio(base.adjust_lr, rows / outputs, columns / inputs) * math.sqrt(outputs / inputs)
        factor *= wanted / lr_ratio(base.adjust_lr, rows, columns)
    else:
        factor /= inputs
    return round(factor, DIGITS)


@torch.no_grad()
def scale_initial_values(model: GPT, base: OptimConfig) -> None:
    """Multiplies the initial values that `init_weights` has drawn as the table above says.

    Those of init=zero_out follow the width already: the std of q, k, v, up and gate is 0.5 / sqrt(C).
    """
    for name, parameter in model.named_parameters():
        factor, inputs, _ = relative_sizes(name, parameter, model.config, base)
        if model.config.init == "gpt2":
            factor /= math.sqrt(inputs)
        if factor != 1:
            parameter.mul_(factor)


def relative_sizes(name: str, parameter: Tensor, config: GPTConfig, base: OptimConfig) -> tuple[float, float, float]:
    """What the table needs to know of a parameter.

    Returns:
        The factor on value and rate that stands for one in the model, on the logits or the scores; and inputs and
        outputs of a matrix in a block, relative to the base model's, whose heads have its width in sum; else 1 and 1.
    """
    part, factor = name.split(".")[-2], 1.0
    if name.startswith("norm."):
        factor = base.base_width / config.dim
    elif part == ("q_proj" if config.qk_norm == "none" else "q_norm"):
        factor = math.sqrt(base.base_head_dim / config.head_size)
    if "blocks." not in name or parameter.ndim != 2:
        return factor, 1.0, 1.0
    stream, heads = config.dim / base.base_width, config.n_heads * config.head_size / base.base_width
    if part in ("q_proj", "k_proj", "v_proj"):
        return factor, stream, heads
    return factor, heads if part == "o_proj" else stream, stream  # the FFN keeps its ratio of hidden width to dim
