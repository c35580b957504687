"""Numbers that texts about attention print, with the call that computes each of them."""

import torch

from tril.model import MultiHeadAttention, causal_mask
from tril.model.attention import attention

# The input of Raschka: six words of three numbers
X = torch.tensor(
    [
        [0.43, 0.15, 0.89],
        [0.55, 0.87, 0.66],
        [0.57, 0.85, 0.64],
        [0.22, 0.58, 0.33],
        [0.77, 0.25, 0.1],
        [0.05, 0.8, 0.55],
    ]
)


def parameters(*sizes, **options):
    return sum(p.numel() for p in MultiHeadAttention(*sizes, **options).parameters())


def lower(rows, columns):
    """Ones where the key is at or before the query, as the texts print their masks."""
    return [[int(key <= query + columns - rows) for key in range(columns)] for query in range(rows)]


PRINTED = [  # name, seed of the text, call, numbers
    # https://github.com/rasbt/LLMs-from-scratch/tree/main/ch03 (Raschka 2024, chapter 3)
    (
        "Raschka 3.3.2, weights of six words",
        0,
        lambda: attention(X * 3**0.5, X, X, need_weights=True)[1],
        [
            [0.2098, 0.2006, 0.1981, 0.1242, 0.122, 0.1452],
            [0.1385, 0.2379, 0.2333, 0.124, 0.1082, 0.1581],
            [0.139, 0.2369, 0.2326, 0.1242, 0.1108, 0.1565],
            [0.1435, 0.2074, 0.2046, 0.1462, 0.1263, 0.172],
            [0.1526, 0.1958, 0.1975, 0.1367, 0.1879, 0.1295],
            [0.1385, 0.2184, 0.2128, 0.142, 0.0988, 0.1896],
        ],
    ),
    (
        "Raschka 3.3.2, context vectors",
        0,
        lambda: attention(X * 3**0.5, X, X),
        [
            [0.4421, 0.5931, 0.579],
            [0.4419, 0.6515, 0.5683],
            [0.4431, 0.6496, 0.5671],
            [0.4304, 0.6298, 0.551],
            [0.4671, 0.591, 0.5266],
            [0.4177, 0.6503, 0.5645],
        ],
    ),
    (
        "Raschka 3.4.2, random matrices for q, k and v",
        123,
        lambda: attention(*(X @ torch.rand(3, 2) for _ in "qkv")),
        [[0.2996, 0.8053], [0.3061, 0.821], [0.3058, 0.8203], [0.2948, 0.7939], [0.2927, 0.7891], [0.299, 0.804]],
    ),
    (
        "Raschka 3.4.2, nn.Linear for q, k and v",
        789,
        lambda: MultiHeadAttention(3, 1, head_dim=2, causal=False, out_proj=False)(X[None])[0],
        [
            [-0.0739, 0.0713],
            [-0.0748, 0.0703],
            [-0.0749, 0.0702],
            [-0.076, 0.0685],
            [-0.0763, 0.0679],
            [-0.0754, 0.0693],
        ],
    ),
    (
        "Raschka exercise 3.1, the same with another seed",
        123,
        lambda: MultiHeadAttention(3, 1, head_dim=2, causal=False, out_proj=False)(X[None])[0],
        [
            [-0.5337, -0.1051],
            [-0.5323, -0.108],
            [-0.5323, -0.1079],
            [-0.5297, -0.1076],
            [-0.5311, -0.1066],
            [-0.5299, -0.1081],
        ],
    ),
    (
        "Raschka 3.5.1, weights before the mask",
        789,
        lambda: MultiHeadAttention(3, 1, head_dim=2, causal=False, out_proj=False)(X[None], need_weights=True)[1][0, 0],
        [
            [0.1921, 0.1646, 0.1652, 0.155, 0.1721, 0.151],
            [0.2041, 0.1659, 0.1662, 0.1496, 0.1665, 0.1477],
            [0.2036, 0.1659, 0.1662, 0.1498, 0.1664, 0.148],
            [0.1869, 0.1667, 0.1668, 0.1571, 0.1661, 0.1564],
            [0.183, 0.1669, 0.167, 0.1588, 0.1658, 0.1585],
            [0.1935, 0.1663, 0.1666, 0.1542, 0.1666, 0.1529],
        ],
    ),
    ("Raschka 3.5.1, mask of ones below the diagonal", 0, lambda: causal_mask(6, 6).int(), lower(6, 6)),
    (
        "Raschka 3.5.1, weights after the mask",
        789,
        lambda: MultiHeadAttention(3, 1, head_dim=2, out_proj=False)(X[None], need_weights=True)[1][0, 0],
        [
            [1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
            [0.5517, 0.4483, 0.0, 0.0, 0.0, 0.0],
            [0.38, 0.3097, 0.3103, 0.0, 0.0, 0.0],
            [0.2758, 0.246, 0.2462, 0.2319, 0.0, 0.0],
            [0.2175, 0.1983, 0.1984, 0.1888, 0.1971, 0.0],
            [0.1935, 0.1663, 0.1666, 0.1542, 0.1666, 0.1529],
        ],
    ),
    (
        "Raschka 3.6.1, two single heads",
        123,
        lambda: torch.cat([MultiHeadAttention(3, 1, head_dim=2, out_proj=False)(X[None])[0] for _ in range(2)], -1),
        [
            [-0.4519, 0.2216, 0.4772, 0.1063],
            [-0.5874, 0.0058, 0.5891, 0.3257],
            [-0.63, -0.0632, 0.6202, 0.386],
            [-0.5675, -0.0843, 0.5478, 0.3589],
            [-0.5526, -0.0981, 0.5321, 0.3428],
            [-0.5299, -0.1081, 0.5077, 0.3493],
        ],
    ),
    (
        "Raschka 3.6.2, one module of two heads",
        123,
        lambda: MultiHeadAttention(3, 2, head_dim=1, out_dim=2, out_bias=True)(X[None])[0],
        [[0.319, 0.4858], [0.2943, 0.3897], [0.2856, 0.3593], [0.2693, 0.3873], [0.2639, 0.3928], [0.2575, 0.4028]],
    ),
    # https://github.com/Tongji-Large-Scale-Research-Group/Awesome-Cloud/blob/main/docs/issue-18.md (after Raschka 2024)
    (
        "Awesome-Cloud, one module of two heads, width 4",
        123,
        lambda: MultiHeadAttention(3, 2, head_dim=2, out_dim=4, out_bias=True)(X[None])[0],
        [
            [0.1184, 0.312, -0.0847, -0.5774],
            [0.0178, 0.3221, -0.0763, -0.4225],
            [-0.0147, 0.3259, -0.0734, -0.3721],
            [-0.0116, 0.3138, -0.0708, -0.3624],
            [-0.0117, 0.2973, -0.0698, -0.3543],
            [-0.0132, 0.299, -0.0689, -0.349],
        ],
    ),
    # https://github.com/rasbt/LLMs-from-scratch/tree/main/ch03 (Raschka 2024, chapter 3)
    (
        "Raschka 3.6.2, without the output projection",
        123,
        lambda: MultiHeadAttention(3, 2, head_dim=2, out_proj=False)(X[None])[0],
        [
            [-0.3132, -0.2272, 0.4772, 0.1063],
            [-0.2308, 0.0329, 0.5764, 0.3007],
            [-0.2059, 0.119, 0.6097, 0.3654],
            [-0.1642, 0.134, 0.5431, 0.3503],
            [-0.1689, 0.1794, 0.5296, 0.3389],
            [-0.1407, 0.1699, 0.504, 0.3403],
        ],
    ),
    ("Raschka exercise 3.3, parameters of GPT-2's attention", 0, lambda: parameters(768, 12, out_bias=True), 2360064),
    # https://github.com/datawhalechina/happy-llm (Datawhale 2025, chapter 2)
    (
        "happy-llm, weights of three words (the last row by hand: 0.0900 0.6652 0.2448 is a misprint)",
        0,
        lambda: attention(
            *torch.zeros(3, 3, 1),
            bias=torch.tensor([[2, 7, 7], [1, 3, 7], [0.5, 2, 1.5]]),
            causal=True,
            need_weights=True,
        )[1],
        [[1.0, 0.0, 0.0], [0.1192, 0.8808, 0.0], [0.122, 0.5465, 0.3315]],
    ),
    (
        "happy-llm, 0.6 of 10 and 0.4 of 5 and nothing of 2",
        0,
        lambda: attention(
            torch.zeros(1, 1),
            torch.zeros(3, 1),
            torch.tensor([[10.0], [5], [2]]),
            bias=torch.tensor([[0.6, 0.4, 0]]).log(),
        ),
        [[8.0]],
    ),
    (
        "happy-llm, weights of four words",
        0,
        lambda: attention(
            *torch.zeros(3, 1, 4, 1),
            bias=torch.tensor(
                [[0.1, 0.2, 0.3, 0.4], [0.2, 0.3, 0.4, 0.1], [0.3, 0.4, 0.2, 0.1], [0.4, 0.1, 0.2, 0.3]]
            ).log(),
            need_weights=True,
        )[1][0],
        [[0.1, 0.2, 0.3, 0.4], [0.2, 0.3, 0.4, 0.1], [0.3, 0.4, 0.2, 0.1], [0.4, 0.1, 0.2, 0.3]],
    ),
    ("happy-llm, mask of [BOS] I like you [EOS]", 0, lambda: causal_mask(5, 5).int(), lower(5, 5)),
    # https://github.com/meta-llama/llama/blob/main/llama/model.py (Meta 2023)
    ("Llama, mask of three tokens after four cached ones", 0, lambda: causal_mask(3, 7).int(), lower(3, 7)),
    # https://github.com/harvardnlp/annotated-transformer (Rush; Huang et al. 2018, 2022)
    (
        "Annotated Transformer, parameters of four nn.Linear(512, 512)",
        0,
        lambda: parameters(512, 8, qkv_bias=True, out_bias=True),
        1050624,
    ),
    ("Annotated Transformer, subsequent_mask(20)", 0, lambda: causal_mask(20, 20).int(), lower(20, 20)),
    # https://arxiv.org/abs/1706.03762 (Vaswani et al. 2017)
    ("Vaswani table 3 (A), 1 head of 512: as many parameters", 0, lambda: parameters(512, 1, head_dim=512), 1048576),
    ("Vaswani table 3 (A), 4 heads of 128: as many parameters", 0, lambda: parameters(512, 4, head_dim=128), 1048576),
    ("Vaswani table 3 (A), 8 heads of 64: as many parameters", 0, lambda: parameters(512, 8, head_dim=64), 1048576),
    ("Vaswani table 3 (A), 16 heads of 32: as many parameters", 0, lambda: parameters(512, 16, head_dim=32), 1048576),
    ("Vaswani table 3 (A), 32 heads of 16: as many parameters", 0, lambda: parameters(512, 32, head_dim=16), 1048576),
    (
        "Vaswani table 3 (B), keys of 16: millions of parameters, 65 with keys of 64",
        0,
        lambda: round(65 - 18 * (4 * 512**2 - parameters(512, 8, head_dim=16, v_head_dim=64)) / 1e6),
        58,
    ),
    (
        "Vaswani table 3 (B), keys of 32: millions of parameters, 65 with keys of 64",
        0,
        lambda: round(65 - 18 * (4 * 512**2 - parameters(512, 8, head_dim=32, v_head_dim=64)) / 1e6),
        60,
    ),
]
