"""Leaks that were published, rebuilt from their descriptions in small models.

B batch, T queries, S keys, C width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.causality.corpus.backbone import DIM, MLP, Attention, Backbone, Mix, causal, masked_softmax, steps
from tests.causality.corpus.entry import CONTEXT_LENGTH, Trigger, leak
from tests.causality.corpus.length_leaks import rotated
from tests.causality.corpus.mixing_leaks import Convolution
from tests.causality.corpus.routing_leaks import best

GITHUB = "https://github.com"
DECODERS = {"place": "blocks.0.attn", "reference": f"{GITHUB}/huggingface/transformers/issues/48745"}
NANOCHAT = {"place": "blocks.0.mlp", "reference": f"{GITHUB}/karpathy/nanochat/issues/844"}
KERAS = {"place": "blocks.0.attn", "reference": f"{GITHUB}/keras-team/keras/issues/23038"}


def everywhere(query: Tensor, key: Tensor) -> Tensor:
    return (query >= 0) & (key >= 0)


class Bidirectional(Attention):
    """A decoder's attention that was given the mask of an encoder: all that is not padding."""

    def __init__(self):
        super().__init__(everywhere)


@leak("masks", **DECODERS)
def roformer_with_an_encoder_mask():
    """RoFormer as a decoder builds a bidirectional mask; its positions are rotary."""

    class RotaryBidirectional(Bidirectional):
        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            return super().scores(rotated(q, 10_000.0), rotated(k, 10_000.0))

    return Backbone(attn=RotaryBidirectional(), positions=Mix(torch.zeros_like))


@leak("masks", **DECODERS)
def big_bird_with_an_encoder_mask():
    """BigBird as a decoder attends to the first block, the last one and its neighbors on both sides."""

    def rule(query, key):
        return (key < 8) | (key >= len(key) - 8) | ((query // 8 - key // 8).abs() <= 1)

    return Backbone(attn=Attention(rule))


@leak("masks", **DECODERS)
def rembert_with_an_encoder_mask():
    """RemBERT as a decoder builds a bidirectional mask; its embedding is smaller than its width."""
    from tests.causality.corpus.entry import VOCAB_SIZE

    return Backbone(attn=Bidirectional(), embed=nn.Sequential(nn.Embedding(VOCAB_SIZE, 8), nn.Linear(8, DIM)))


@leak("masks", **DECODERS)
def megatron_bert_with_an_encoder_mask():
    """Megatron-BERT as a decoder builds a bidirectional mask in all of its layers, which norm their inputs."""
    model = Backbone(n_layers=2)
    for block in model.blocks:
        block.attn = Bidirectional()
    return model


@leak("masks", place="blocks.0.attn", reference=f"{GITHUB}/huggingface/transformers/pull/38094")
def llama4_with_an_inverted_mask():
    """An additive mask of the smallest number is converted to bool, where True means visible: the future alone."""

    class Inverted(Attention):
        def visible(self, x: Tensor) -> Tensor:
            additive = torch.zeros(x.shape[1], x.shape[1], device=x.device)
            additive = additive.masked_fill(~super().visible(x), torch.finfo(torch.float32).min)
            boolean = additive.bool()
            return boolean | ~boolean.any(-1, keepdim=True)

    return Backbone(attn=Inverted())


@leak("masks", place="blocks.0.attn", reference=f"{GITHUB}/rasbt/LLMs-from-scratch/pull/1062")
def triangle_of_masked_keys_passed_to_sdpa():
    """`torch.triu(diagonal=1)` marks what to hide, and scaled_dot_product_attention shows what is True."""

    class WithSDPA(Attention):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.triu(torch.ones(x.shape[1], x.shape[1], device=x.device), diagonal=1).bool()
            out = F.scaled_dot_product_attention(*self.heads(x), attn_mask=mask)
            return self.merge(out.nan_to_num())  # the last row sees nothing

    return Backbone(attn=WithSDPA())


@leak("pooling over the sequence", **NANOCHAT)
def aggregation_inside_a_block():
    """Each position gets the aggregate of its block of 16 tokens, of which most come later."""

    def aggregated(x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, -x.shape[1] % 16)).unflatten(1, (-1, 16))  # (B, T / 16, 16, C)
        return x + padded.mean(2, keepdim=True).expand_as(padded).flatten(1, 2)[:, : x.shape[1]]

    return Backbone(mlp=nn.Sequential(Mix(aggregated), MLP()))


@leak("global mixing", **NANOCHAT)
def chunks_that_mix_their_tokens():
    """Whole chunks of 8, 16 and 32 tokens are mixed by a dense matrix each."""

    class ChunkMixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.sizes = (8, 16, 32)
            self.mixers = nn.ModuleList(nn.Linear(size, size, bias=False) for size in self.sizes)

        def forward(self, x: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for size, mixer in zip(self.sizes, self.mixers, strict=True):
                whole = x.shape[1] // size * size
                chunks = x[:, :whole].unflatten(1, (-1, size))  # (B, T / size, size, C)
                out = out + F.pad(mixer(chunks.mT).mT.flatten(1, 2), (0, 0, 0, x.shape[1] - whole))
            return out

    return Backbone(mlp=ChunkMixer())


@leak("global mixing", **NANOCHAT)
def circular_mixing():
    """Positions are mixed by a circular convolution over the whole sequence."""

    class Circular(nn.Module):
        def __init__(self):
            super().__init__()
            self.filter = nn.Parameter(torch.randn(CONTEXT_LENGTH, DIM) / 4)

        def forward(self, x: Tensor) -> Tensor:
            spectrum = torch.fft.rfft(x, dim=1) * torch.fft.rfft(self.filter[: x.shape[1]], dim=0)
            return torch.fft.irfft(spectrum, x.shape[1], dim=1)

    return Backbone(mlp=Circular())


class FlashOrManual(Attention):
    """Attention with a fast path, which has the mask, and a manual one, which forgets it.

    Args:
        manual: whether the manual path runs, a function of the module.
    """

    def __init__(self, manual):
        super().__init__()
        self.manual = manual

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        if not self.manual(self):
            return self.merge(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        weights = self.scores(q, k).softmax(-1)
        return self.merge(F.dropout(weights, 0.1, self.training) @ v)


@leak("training mode", **KERAS, trigger=Trigger(training=True))
def causal_flag_dropped_with_dropout():
    """With dropout the fused kernel is not taken, and the manual path applies no causal mask."""
    return Backbone(attn=FlashOrManual(lambda self: self.training))


@leak("masks", **KERAS)
def causal_flag_dropped_with_returned_scores():
    """The layer is asked for its attention scores, which disables the fused kernel and with it the mask."""
    return Backbone(attn=FlashOrManual(lambda self: True))


@leak(
    "documents and padding",
    place="blocks.0.attn",
    reference=f"{GITHUB}/keras-team/keras/pull/23040",
    trigger=Trigger(tokens=(2,)),
)
def causal_flag_dropped_with_a_padding_mask():
    """An attention mask next to the causal flag turns the flag off."""
    from tests.causality.corpus.token_leaks import unmasked_with

    return unmasked_with(lambda ids: (ids == 2).any(1))


@leak("masks", place="blocks.0.attn", reference=f"{GITHUB}/keras-team/keras/issues/21284")
def causal_flag_not_forwarded():
    """A wrapper takes `use_causal_mask=True` and calls the attention inside with False."""

    class Inner(Attention):
        def forward(self, x: Tensor, use_causal_mask: bool = False) -> Tensor:
            self.rule = causal if use_causal_mask else everywhere
            return super().forward(x)

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.mha = Inner()

        def forward(self, x: Tensor, use_causal_mask: bool = True) -> Tensor:
            return self.mha(x, use_causal_mask=False)

    return Backbone(attn=Wrapper())


@leak("global mixing", place="blocks.0.attn", reference=f"{GITHUB}/tatp22/linformer-pytorch/issues/25")
def linformer_with_a_causal_flag():
    """Keys and values are projected over the sequence to 16 rows, whose triangle hides nothing of the future."""

    class Linformer(Attention):
        def __init__(self):
            super().__init__()
            self.projection = nn.Parameter(torch.randn(16, CONTEXT_LENGTH) / 8)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.heads(x)
            projection = self.projection[:, : x.shape[1]]
            visible = steps(x)[:, None] >= torch.arange(16, device=x.device)
            return self.merge(masked_softmax(self.scores(q, projection @ k), visible) @ (projection @ v))

    return Backbone(attn=Linformer())


@leak("expert-choice routing", place="blocks.0.attn", reference=f"{GITHUB}/piotrpiekos/MoSA/issues/3")
def attention_heads_that_choose_their_tokens():
    """Each head attends among the half of the tokens that its router ranks first in the sequence."""

    class Chosen(Attention):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(DIM, 4)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.heads(x)
            chosen = best(self.router(x), 0.5).mT[:, :, None]  # (B, H, 1, T)
            own = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
            return self.merge(masked_softmax(self.scores(q, k), self.visible(x) & (chosen | own)) @ v)

    return Backbone(attn=Chosen())


@leak("convolution", place="blocks.0.mlp", reference=f"{GITHUB}/tensorflow/models/issues/10062")
def same_padding_in_a_causal_convolution():
    """A layer that is called causal pads both sides, so that a kernel of 5 sees two later positions."""
    return Backbone(mlp=Convolution(5, 2, 2))


@leak("convolution", place="blocks.0.mlp", reference=f"{GITHUB}/lucidrains/magvit2-pytorch/pull/27")
def downsampling_with_too_little_padding():
    """A convolution of stride 2 is padded by 2 on the left, and both positions of a pair get its output."""

    class Downsampled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(DIM, DIM, 3, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            pairs = self.conv(F.pad(x.mT, (1, 2))).mT  # the output i sees up to position 2 i + 1
            return pairs.repeat_interleave(2, 1)[:, : x.shape[1]]

    return Backbone(mlp=Downsampled())
