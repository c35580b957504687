"""docs/add_your_own.md: the class, the field and the formula of the page, in this process."""

import dataclasses
from typing import get_args, get_type_hints

import tril.model
from tests.documented import EDITED, ROOT, blocks
from tril.model import causal_mask, config, masks, positions
from tril.model.causality import assert_causal
from tril.model.gpt import GPT, GPTConfig


def test_the_page_adds_a_position_bias_that_has_its_formula_and_sees_no_future(monkeypatch):
    addition, field, formula, _ = blocks(ROOT / "docs" / EDITED, "python")
    monkeypatch.setitem(positions.POSITIONS, "log", None)
    exec(addition, dict(vars(positions)))
    head = "@dataclass(frozen=True, config=strict_settings('model'))\nclass Edited(GPTConfig):\n"
    exec(f"{head}    {field.strip()} = 'log'", names := dict(vars(config)))
    new = set(get_args(get_type_hints(names["Edited"])["pos"]))
    assert new == {*get_args(get_type_hints(GPTConfig)["pos"]), "log"}
    monkeypatch.setattr(tril.model, "GPTConfig", names["Edited"])
    exec(formula, {})
    sizes = {"vocab_size": 31, "context_length": 12}
    model = GPT(names["Edited"](**sizes, n_layers=1, dim=32, n_heads=4))
    assert dataclasses.asdict(model.config)["pos"] == "log" and type(model.pos_embed).__name__ == "LogAlibi"
    assert_causal(model, **sizes, budget_seconds=1.0)


def test_the_page_edits_the_mask_of_every_second_position(monkeypatch):
    edit = blocks(ROOT / "docs" / EDITED, "python")[3]
    exec(f"def edited(query, key, window):\n    {edit}\n    return visible", names := {})
    monkeypatch.setattr(masks, "visible_from_positions", names["edited"])
    assert causal_mask(1, 5).tolist() == [[True, False, True, False, True]]
    assert_causal(GPT(GPTConfig(31, 12, n_layers=2, dim=32, n_heads=4)), budget_seconds=1.0)
