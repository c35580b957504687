"""The attention page of hand-made maps, and what a test reads from it in a browser."""

import torch

from tests.browser import Page
from tril.model.heads.page import write_page

TOKENS = ["def", " f", "(", "\n\tx", ")"]
WRITTEN = ["def", "·f", "(", "↵→x", ")"]
L1H0 = [
    [1.0, 0.0, 0.0, 0.0, 0.0],
    [0.25, 0.75, 0.0, 0.0, 0.0],
    [0.5, 0.125, 0.375, 0.0, 0.0],
    [0.125, 0.0, 0.625, 0.25, 0.0],
    [0.5, 0.25, 0.125, 0.0, 0.125],
]
SELF, FIRST = torch.eye(5), torch.eye(5)[0].expand(5, 5)
LAYERS = [[FIRST, SELF, (FIRST + SELF) / 2], [torch.tensor(L1H0), (3 * FIRST + SELF) / 4, (FIRST + 3 * SELF) / 4]]
MAPS = torch.stack([torch.stack(heads) for heads in LAYERS])  # (2, 3, 5, 5)
AFTER = [
    [(" g", 0.5), ("\n", 0.25)],
    [("(", 0.75)],
    [(")", 0.5), ("\n\tx", 0.3125), ("*", 0.0004)],
    [(",", 1.0)],
    [(":", float("nan"))],
]


def write(path, maps=MAPS, tokens=TOKENS, after=AFTER, title="A title", scores=None):
    write_page(path / "page.html", tokens=tokens, maps=maps, probabilities=after, title=title, scores=scores)
    return path / "page.html"


class AttentionPage(Page):
    def token(self, t):
        return self.find(f".token[data-token='{t}']")

    def weights(self):
        """The weights of the query, from the tooltips of the tokens."""
        return self.attributes(".token", "title")

    def point_at_cell(self, row, column):
        """Moves to a point right of and below the cell's center."""
        size = self.find("#canvas").size["width"] / 5
        self.point(self.find("#canvas"), round((column - 1.75) * size), round((row - 1.75) * size))

    def select(self, layer, head):
        self.find(f"#overview button[title='{head_name(layer, head)}']").click()


def shown(weights):
    """Weights as the page writes them."""
    return [f"weight {w:.3f}" if w else "weight 0" for w in weights]


def head_name(layer, head):
    return f"L{layer}H{head}" if head < 3 else f"L{layer}, mean of all heads"
