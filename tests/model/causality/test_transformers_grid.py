"""Models of `transformers` pass, however they come in; a mistake planted in one fails by the check that is named for it."""

import copy
import itertools

import pytest
import torch
import transformers
from transformers import GPT2LMHeadModel
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen3 import modeling_qwen3

from tests.conftest import assert_close, randomise
from tril.model.causality.checks import run_checks
from tril.model.causality.grids.gpt_grid import certify
from tril.model.causality.grids.transformers_grid import TransformersSubject, transformers_cells

V, T = 61, 48
SHAPE = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": T,
}
GROUPED = SHAPE | {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}
FAMILIES = {
    "gpt2": {"vocab_size": V, "n_positions": T, "n_embd": 32, "n_layer": 3, "n_head": 4},
    "qwen3": GROUPED,
    "mistral": GROUPED | {"sliding_window": 8},
    "llama": GROUPED,
    "gemma2": GROUPED
    | {"sliding_window": 8, "query_pre_attn_scalar": 8},  # every other layer has the window; tanh caps the scores
    "gpt_neox": SHAPE | {"intermediate_size": 64},
}
CAPPED = () if transformers.Gemma2ForCausalLM._supports_sdpa else ("gemma2",)  # since sdpa has no cap for scores
REACH = {"no future", "rows"}


def config(family, **changes):
    made = transformers.AutoConfig.for_model(family, **FAMILIES[family] | changes)
    made.bos_token_id = made.eos_token_id = made.pad_token_id = None
    return made


@pytest.fixture
def described(tmp_path):
    """Writes a config alone and names its file."""

    def write(family, **changes):
        path = tmp_path / f"{family}.json"
        config(family, **changes).to_json_file(path)
        return str(path)

    return write


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder that `save_pretrained` wrote, and the model."""
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    model = randomise(GPT2LMHeadModel(config("gpt2"))).eval()
    model.to(torch.bfloat16).save_pretrained(folder)  # as most are published: loaded as float32 it is the same numbers
    return folder, model.float()


def results(cells, **labels):
    """Of the cells that have these labels and no dropout, all results."""
    chosen = [
        cell
        for cell in cells
        if labels | {"dropout": False} == {key: cell.labels.get(key, False) for key in [*labels, "dropout"]}
    ]
    assert chosen
    return [result for cell in chosen for result in run_checks(cell)]


def failed(found):
    return {result.check for result in found if not result.passed}


# -- models that are right --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family != "gpt2"]
)  # which comes as a folder, below
def test_families_pass_with_random_weights(family, described):
    found = certify(family, transformers_cells(described(family), precisions=("32-true",)))
    assert found.passed, found.summary()["failed"]
    assert found.checks().keys() == REACH | {"all of the past", "attention", "decoding", "canary"}
    ran = {}
    for result in found.results[1:]:
        ran.setdefault(result.cell, set()).add(result.check)
    own = next(iter(ran))  # the first cell; the grid has it once more
    attentions = ("eager",) if family in CAPPED else ("eager", "sdpa")
    for attention in attentions:
        seen = {"attention"} if attention == "eager" else set()
        name = f"attention={attention} precision=32-true"
        assert ran.pop(f"weights=random {name}") - {"canary"} == REACH | {"all of the past", "decoding"} | seen
        assert ran.pop(f"weights=initial {name}") == ran.pop(f"weights=sharp {name}") == REACH | seen
        assert ran.pop(f"weights=random {name} dropout=True") == REACH | seen
    assert not ran and own == f"weights=random attention={attentions[-1]} precision=32-true"
    assert set(found.reach) == {"perturbation", "gradient"} and not found.reach["gradient"].isnan().any()


def test_a_saved_folder_passes_in_all_precisions_with_its_own_weights(trained, capfd):
    folder, model = trained
    cells = list(transformers_cells(str(folder)))
    names = [(cell.labels["weights"], cell.labels["attention"], cell.labels["precision"]) for cell in cells]
    grid = itertools.product(("eager", "sdpa"), ("32-true", "bf16-mixed"), ("random", "trained", "sharp", "random"))
    assert names == [
        ("trained", "sdpa", "32-true"),
        *((kind, attention, precision) for attention, precision, kind in grid),
    ]
    ids = torch.randint(V, (2, T))
    assert_close(cells[0].subject(ids).detach(), model(ids).logits.detach())
    found = certify("gpt2", cells)
    assert found.passed, found.summary()["failed"]
    counts = found.checks()
    assert counts.pop("attention") >= 4 * 4 + 4  # lengths of the eager cells: four each, or one
    # 9 of 17 cells have four lengths and compare 3 chunkings and 3 paddings, 2 of them twice; the reach is measured in two ways
    assert counts == {
        "no future": 2 * (9 * 4 + 8),
        "all of the past": 9 * 4,
        "decoding": 9 * 8,
        "rows": 17,
        "canary": 1,
    }
    assert capfd.readouterr() == ("", "")


def test_a_folder_with_a_config_alone_has_weights_by_the_seed(tmp_path):
    config("qwen3").save_pretrained(tmp_path)
    cells = [itertools.islice(transformers_cells(str(tmp_path), seed=seed), 3) for seed in (0, 0, 1)]
    for first, again, other in zip(*cells):  # the first cell, random weights, initial ones
        logits = [cell.subject(torch.arange(9)[None]) for cell in (first, again, other)]
        assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_layers_and_what_is_made_sharp_and_dropped(family, described):
    cells = list(transformers_cells(described(family), precisions=("32-true",)))
    random, initial, sharp, dropped = (cell.subject.module for cell in cells if cell.labels["attention"] == "eager")
    layers = random.transformer.h if family == "gpt2" else random.model.layers
    assert cells[1].subject.module is random and cells[1].subject.blocks() is layers
    part = {"gpt2": ("c_attn.weight", "c_attn.bias"), "qwen3": ("q_norm.weight", "k_norm.weight")}[family]
    for (name, a), b in zip(random.named_parameters(), sharp.parameters()):
        assert torch.equal(b, 100 * a if name.endswith(part) else a)
    chances = [m.p for m in dropped.modules() if isinstance(m, torch.nn.Dropout)]
    chances = chances or [layer.self_attn.attention_dropout for layer in dropped.model.layers]
    assert set(chances) == {0.2} and dropped.training and not (random.training or initial.training or sharp.training)


# -- models that are wrong ----------------------------------------------------------------------------------------------------------------


def test_attention_to_both_sides_fails_everywhere(described, monkeypatch):
    mask = modeling_qwen3.create_causal_mask
    monkeypatch.setattr(
        modeling_qwen3,
        "create_causal_mask",
        lambda **choices: mask(**choices, or_mask_function=lambda b, h, q, k: k >= 0),
    )
    found = certify("qwen3", transformers_cells(described("qwen3"), precisions=("32-true",)))
    failures = found.failures()
    assert list(failures) == ["attention", "no future", "decoding", "canary"]
    assert failures["attention"][0].where.startswith("layer 0, head 0, query 0, key 1: weight ")
    assert failures["no future"][0].where == "by perturbation: query 0 changes with key 1, first in layer 0"
    cells = {result.cell.removesuffix(" precision=32-true") for result in failures["no future"]}
    assert cells >= {
        f"weights={kind} attention={how}" for how in ("eager", "sdpa") for kind in ("random", "initial", "sharp")
    }


def test_one_weight_of_one_head_is_found(described, monkeypatch):
    whole = modeling_llama.eager_attention_forward

    def leaking(module, q, k, v, mask, **choices):
        if module.layer_idx == 1 and q.shape[2] == k.shape[2] == 37:
            mask = mask.repeat(1, q.shape[1], 1, 1)  # (B, 1, T, S) -> (B, H, T, S)
            mask[:, 2, 5, 30] = 0
        return whole(module, q, k, v, mask, **choices)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", leaking)
    cells = transformers_cells(described("llama"), precisions=("32-true",))
    found = [result for result in results(cells, attention="eager", weights="random") if not result.passed]
    assert [result.check for result in found[:3]] == ["no future", "no future", "attention"]
    # what layer 1 sees at key 30 has seen all keys up to it, the first of them in the future being 6
    assert found[0].where == "by perturbation: query 5 changes with key 6, first in layer 1"
    assert found[1].where == "by gradient: query 5 has a gradient with respect to key 6"
    assert found[2].where.startswith("layer 1, head 2, query 5, key 30: weight ")


def of_window(window):
    """Mistral's mask with another window than its config has."""
    mask = modeling_mistral.create_sliding_window_causal_mask

    def other(*, config, **choices):
        config = copy.copy(config)
        config.sliding_window = window
        return mask(config=config, **choices)

    return other


@pytest.mark.parametrize("window, mistakes", [(7, {"all of the past"}), (9, {"no future", "attention", "decoding"})])
def test_a_window_that_is_not_the_configs_is_found(window, mistakes, described, monkeypatch):
    monkeypatch.setattr(modeling_mistral, "create_sliding_window_causal_mask", of_window(window))
    found = results(
        transformers_cells(described("mistral"), precisions=("32-true",)), attention="eager", weights="random"
    )
    assert failed(found) - {"decoding"} == mistakes - {"decoding"}  # its cache keeps what the config says
    first = {
        7: "query 13 does not see key 0",
        9: "by perturbation: query 15 changes with key 0 behind the window, first in layer ",
    }[window]
    assert any(result.where.startswith(first) for result in found if not result.passed and result.length == 37)


def test_a_mistake_in_the_cache_is_found_by_decoding_alone(trained, monkeypatch):
    layer, kept = transformers.cache_utils.DynamicLayer, transformers.cache_utils.DynamicLayer.update

    def forgetful(self, *states, **choices):
        keys, values = kept(self, *states, **choices)
        return keys, torch.cat((values[..., :1, :] / 2, values[..., 1:, :]), dim=-2)

    monkeypatch.setattr(layer, "update", forgetful)
    found = results(transformers_cells(str(trained[0]), precisions=("32-true",)), weights="trained")
    wrong = {result.where.partition(":")[0] for result in found if not result.passed}
    assert failed(found) == {"decoding"} and wrong == {"chunks of 1", "chunks of 7", "random chunks"}


def test_padding_that_is_seen_is_found_by_decoding_alone(trained, monkeypatch):
    mask = modeling_gpt2.create_causal_mask

    def blind(*, attention_mask, **choices):
        return mask(attention_mask=None if attention_mask is None else torch.ones_like(attention_mask), **choices)

    monkeypatch.setattr(modeling_gpt2, "create_causal_mask", blind)
    found = results(transformers_cells(str(trained[0]), precisions=("32-true",)), weights="trained", attention="eager")
    wrong = [result.where for result in found if not result.passed]
    assert failed(found) == {"decoding"} and [where.split()[1] for where in wrong] == ["18", "18", "36", "36"]


def test_a_copy_of_a_subject_runs_the_copied_model(trained):
    subject = TransformersSubject(copy.deepcopy(trained[1]))
    twin, ids = copy.deepcopy(subject), torch.arange(9)[None]
    before = subject(ids)
    torch.nn.init.zeros_(twin.module.transformer.ln_f.weight)
    torch.nn.init.zeros_(twin.module.transformer.ln_f.bias)
    assert (twin(ids) == 0).all() and torch.equal(subject(ids), before)
    exact = subject.in_float64()(ids)
    assert exact.dtype == torch.float64
    assert_close(before, exact)
