"""The learning rates that the matrices of a model really have."""

from tril.model.gpt import GPT
from tril.model.training.optim import OptimConfig, param_groups
from tril.model.training.width_scaling import lr_ratio


def effective_rates(model: GPT, config: OptimConfig) -> dict[str, float]:
    """The peak learning rate of each kind of matrix, such as {"embed": 0.02, "q_proj": 0.014, ...}.

    It includes `lr_scale`, Muon's factor for the matrix's shape, and `scale_with_width`. Rates of Muon and AdamW differ
    in their unit: Muon's is the spectral norm of a step, AdamW's the size of each element's. A tied head is the
    embedding. The model may be on the meta device.
    """
    rates = {}
    for group in param_groups(model, config):
        for parameter in group["params"]:
            shape_factor = lr_ratio(group["adjust_lr"], *parameter.shape) if group["kind"] == "muon" else 1.0
            rates[id(parameter)] = group["lr"] * shape_factor
    return {
        name.split(".")[-2]: rates[id(parameter)] for name, parameter in model.named_parameters() if parameter.ndim == 2
    }
