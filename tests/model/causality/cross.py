"""A decoder with cross-attention, as one function of token ids: the first ones are its context.

B batch, T decoder positions, S context positions, C width, V vocabulary.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tril.model.block import Block, block_norm, make_attention
from tril.model.causality.attention_formula import ScoreFormula
from tril.model.causality.receptive_field import expected_dependencies
from tril.model.causality.subject import GPTSubject, ProbedLayer, score_formula
from tril.model.gpt import GPT, GPTConfig

N_CONTEXT = 5  # S


class DecoderBlock(Block):
    """The decoder block of an encoder-decoder model (Vaswani et al. 2017, section 3.1)."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.norm_cross, self.cross_attn = block_norm(config), make_attention(config)

    def forward(self, x: Tensor, *, context: Tensor, last_only: bool = False, **options) -> Tensor:
        out = x[:, -1:] if last_only else x
        out = out + self.attn(self.norm1(x), last_only=last_only, **options)
        out = out + self.cross_attn(self.norm_cross(out), context)
        return out if self.mlp is None else out + self.mlp(self.norm2(out))


class CrossBlock(nn.Module):
    """`DecoderBlock` on the decoder's part of the stream; the context passes through unchanged."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.block = DecoderBlock(config)

    def forward(self, x: Tensor, *, rope, bias: Tensor | None, last_only: bool, mask: None, **options) -> Tensor:
        context, x = x[:, :N_CONTEXT], x[:, N_CONTEXT:]  # (B, S, C), (B, T, C)
        rope = None if rope is None else tuple(table[N_CONTEXT:] for table in rope)
        bias = None if bias is None else bias[:, N_CONTEXT:, N_CONTEXT:]
        x = self.block(x, context=context, rope=rope, bias=bias, last_only=last_only, **options)
        return x if last_only else torch.cat([context, x], dim=1)


class CrossGPT(GPT):
    """Logits (B, S + T, V): of the context from each token alone, of the decoder from the context and its past."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.blocks = nn.ModuleList(CrossBlock(config) for _ in self.blocks)


class CrossSubject(GPTSubject):
    def visible(self, length: int, layer: int | None = None) -> Tensor:
        """All of the context from every decoder position, and no decoder position from the context."""
        visible = torch.eye(length, dtype=torch.bool)
        visible[N_CONTEXT:, :N_CONTEXT] = True
        visible[N_CONTEXT:, N_CONTEXT:] = expected_dependencies(length - N_CONTEXT, self.windows)
        return visible

    def probed_layers(self, length: int) -> list[ProbedLayer]:
        length, formula, layers = length - N_CONTEXT, score_formula(self.model.config, length - N_CONTEXT), []
        visible, context = expected_dependencies(length, self.windows[:1]), torch.ones(length, N_CONTEXT).bool()
        for i, outer in enumerate(() if self.compiled else self.model.blocks):
            layers.append(ProbedLayer(f"layer {i}", outer.block.attn, visible, formula))
            of_context = ScoreFormula(formula.norm, formula.norm_eps)
            layers.append(ProbedLayer(f"layer {i}, cross-attention", outer.block.cross_attn, context, of_context))
        return layers

    def decode(self, ids: Tensor, sizes: Sequence[int]) -> Tensor:
        parts = self._decode(ids, sizes)
        return torch.cat([parts[0][:, :N_CONTEXT], *(logits[:, N_CONTEXT:] for logits in parts)], dim=1)

    def decode_last(self, ids: Tensor, sizes: Sequence[int]) -> Tensor:
        in_context = [end - 1 for end in itertools.accumulate(sizes) if end <= N_CONTEXT]
        return torch.cat([self(ids)[:, in_context], *self._decode(ids, sizes, last_only=True)], dim=1)

    def _decode(self, ids: Tensor, sizes: Sequence[int], *, last_only: bool = False) -> list[Tensor]:
        """The logits of each chunk behind the context; the context is given with every chunk and not cached."""
        model, cache = self.model, self.model.new_cache(len(ids), ids.shape[1])
        ends = sorted({N_CONTEXT, *(end for end in itertools.accumulate(sizes) if end > N_CONTEXT)})

        def run(start: int, end: int) -> Tensor:
            columns = [*range(N_CONTEXT), *range(start, end)]
            hidden = model.hidden(ids[:, columns], cache=cache, positions=torch.tensor(columns), last_only=last_only)
            cache.length -= N_CONTEXT
            return model.logits(hidden)

        return [self._call(lambda a=start, b=end: run(a, b)) for start, end in itertools.pairwise(ends)]

    def decode_steps(self, ids: Tensor, n_prompt: int) -> None:
        return None

    def padded(self, ids: Tensor, padding: Sequence[int]) -> None:
        return None

    def packed(self, ids: Tensor, eot: int) -> None:
        return None
