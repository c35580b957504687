"""Root mean square layer normalization (Zhang & Sennrich 2019, arXiv:1910.07467)."""

import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * weight over the last dimension, in the dtype of x.

    Under autocast x may be bf16 while the weight is float32; `nn.RMSNorm` then returns float32 and takes a slower path.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.type_as(x), self.eps)
