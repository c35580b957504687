"""Shows what the causal mask does, with a run and the same run without it:

    tril train; tril train experiment=control_no_mask
    python -m tril.scripts.maintenance.control RUN RUN_WITHOUT_MASK TEXT

The loss of one pass over a window, as in training, is valid only if no position sees a later one. The prefix-only loss
predicts each target from a pass over its prefix and nothing else, whatever the attention does. Prints a table of both.

B windows, T targets in each, V vocabulary.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tril.model.gpt import GPT
from tril.model.runs import find_checkpoint, load

WINDOWS = 32


def prefix_only_nll(model: GPT, ids: Tensor, targets: Tensor) -> Tensor:
    """Nats of each target, (B, T), given ids[:, : t + 1] alone; for a causal model the same, up to rounding."""
    columns = [
        F.cross_entropy(model(ids[:, : t + 1])[:, -1], targets[:, t], reduction="none") for t in range(ids.shape[1])
    ]
    return torch.stack(columns, dim=1)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs=2, metavar="RUN", help="with the mask, and without it")
    parser.add_argument("text", type=Path, help="a text that neither run was trained on")
    arguments = parser.parse_args()
    text = arguments.text.read_text("utf-8")
    print("| nats per token | one pass | prefix only |\n|---|---:|---:|")
    for name, run in zip(("with the mask", "without it"), arguments.runs, strict=True):
        # Not the best checkpoint: without the mask it is chosen by a false loss.
        lm = load(find_checkpoint(run, prefer=("last",)), device="cpu")
        model, length = lm.model.eval(), lm.config.context_length
        tokens = torch.tensor(lm.tokenizer.encode(text).ids[: WINDOWS * length + 1])
        n = (len(tokens) - 1) // length
        batch = tokens[: n * length].view(n, length), tokens[1 : n * length + 1].view(n, length)
        print(f"| {name} | {model.nll(*batch).mean():.4f} | {prefix_only_nll(model, *batch).mean():.4f} |")


if __name__ == "__main__":
    main()
