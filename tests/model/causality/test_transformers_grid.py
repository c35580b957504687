"""Models of `transformers` pass from a config and from a folder; a defect patched into one fails its check."""

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

from tests.conftest import assert_close, randomize
from tril.model.causality.case import structural_lengths
from tril.model.causality.certificate import certify
from tril.model.causality.checks import run_checks
from tril.model.causality.grids.transformers_grid import TransformersSubject, transformers_cases

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
    "gemma2": GROUPED | {"sliding_window": 8, "query_pre_attn_scalar": 8},  # window in every other layer; capped scores
    "gpt_neox": SHAPE | {"intermediate_size": 64},
}
CAPPED = () if transformers.Gemma2ForCausalLM._supports_sdpa else ("gemma2",)  # sdpa cannot cap scores
DEPENDENCY = {"repeatable", "no future", "rows"}


def config(family, **changes):
    made = transformers.AutoConfig.for_model(family, **FAMILIES[family] | changes)
    made.bos_token_id = made.eos_token_id = made.pad_token_id = None
    return made


@pytest.fixture
def described(tmp_path):
    """Writes a config and returns its path."""

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
    model = randomize(GPT2LMHeadModel(config("gpt2", n_layer=1, n_embd=16, n_head=2))).eval()
    model.to(torch.bfloat16).save_pretrained(folder)  # as most are published; exact in float32
    return folder, model.float()


def results(cases, **labels):
    """All results of the cases with these labels and without dropout."""
    chosen = [
        case
        for case in cases
        if labels | {"dropout": False} == {key: case.labels.get(key, False) for key in [*labels, "dropout"]}
    ]
    assert chosen
    return [result for case in chosen for result in run_checks(case)]


def failed(measured):
    return {result.check for result in measured if not result.passed}


# Models that pass


@pytest.mark.parametrize(
    "family",  # gpt2 is loaded from a folder, below
    ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in ("gpt2", "qwen3"))],
)
@pytest.mark.usefixtures("short_canary")
def test_families_pass_with_random_weights(family, described):
    measured = certify(family, transformers_cases(described(family), precisions=("32-true",)))
    assert measured.passed, measured.summary()["failed"]
    assert measured.checks().keys() == DEPENDENCY | {"all of the past", "attention", "decoding", "padding", "canary"}
    ran = {}
    for result in measured.results[1:]:
        ran.setdefault(result.case, set()).add(result.check)
    own = next(iter(ran))  # the first case; the grid contains it again
    attentions = ("eager",) if family in CAPPED else ("eager", "sdpa")
    for attention in attentions:
        seen = {"attention"} if attention == "eager" else set()
        name = f"attention={attention} precision=32-true"
        equal = {"all of the past", "decoding", "padding"}
        assert ran.pop(f"weights=random {name}") - {"canary"} == DEPENDENCY | equal | seen
        assert ran.pop(f"weights=initial {name}") == ran.pop(f"weights=sharp {name}") == DEPENDENCY | seen
        assert ran.pop(f"weights=random {name} dropout=True") == DEPENDENCY | seen
    assert not ran and own == f"weights=random attention={attentions[-1]} precision=32-true"
    assert (
        set(measured.dependencies) == {"perturbation", "gradient"}
        and not measured.dependencies["gradient"].isnan().any()
    )


@pytest.mark.usefixtures("short_canary")
def test_a_saved_folder_passes_in_all_precisions_with_its_own_weights(trained, capfd):
    folder, model = trained
    cases = list(transformers_cases(str(folder)))
    names = [(case.labels["weights"], case.labels["attention"], case.labels["precision"]) for case in cases]
    grid = itertools.product(("eager", "sdpa"), ("32-true", "bf16-mixed"), ("random", "trained", "sharp", "random"))
    assert names == [
        ("trained", "sdpa", "32-true"),
        *((kind, attention, precision) for attention, precision, kind in grid),
    ]
    ids = torch.randint(V, (2, T))
    assert_close(cases[0].subject(ids).detach(), model(ids).logits.detach())
    measured = certify("gpt2", cases)
    assert measured.passed, measured.summary()["failed"]
    counts = measured.checks()
    assert counts.pop("attention") >= 4 * 4 + 4  # lengths of the eager cases: four each, or one
    # 9 of 17 cases have four lengths, and compare 3 chunkings and 3 paddings, 2 of them twice.
    # Dependencies are measured by two methods.
    assert counts == {
        "repeatable": 13 * 2 + 4,  # with dropout, a text alone is not compared with itself in a batch
        "no future": 2 * (9 * 4 + 8) + 16 + len(structural_lengths(T)) + 1,  # texts replaced in each case, and cut off
        "all of the past": 9 * 4,
        "decoding": 9 * 3,
        "padding": 9 * 5,
        "rows": 17,
        "canary": 1,
    }
    assert capfd.readouterr() == ("", "")


def test_a_folder_with_a_config_alone_has_weights_by_the_seed(tmp_path):
    config("qwen3").save_pretrained(tmp_path)
    cases = [itertools.islice(transformers_cases(str(tmp_path), seed=seed), 3) for seed in (0, 0, 1)]
    for first, again, other in zip(*cases, strict=False):  # the first case, random weights, initial ones
        logits = [case.subject(torch.arange(9)[None]) for case in (first, again, other)]
        assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_layers_sharpened_parameters_and_dropout(family, described):
    cases = list(transformers_cases(described(family), precisions=("32-true",)))
    random, initial, sharp, dropped = (case.subject.module for case in cases if case.labels["attention"] == "eager")
    assert cases[1].subject.module is random
    part = {"gpt2": ("c_attn.weight", "c_attn.bias"), "qwen3": ("q_norm.weight", "k_norm.weight")}[family]
    for (name, a), b in zip(random.named_parameters(), sharp.parameters(), strict=False):
        assert torch.equal(b, 100 * a if name.endswith(part) else a)
    chances = [m.p for m in dropped.modules() if isinstance(m, torch.nn.Dropout)]
    chances = chances or [layer.self_attn.attention_dropout for layer in dropped.model.layers]
    assert set(chances) == {0.2} and dropped.training and not (random.training or initial.training or sharp.training)


# Models that fail


def test_bidirectional_attention_fails_in_every_case(described, monkeypatch):
    mask = modeling_qwen3.create_causal_mask
    monkeypatch.setattr(
        modeling_qwen3,
        "create_causal_mask",
        lambda **choices: mask(**choices, or_mask_function=lambda b, h, q, k: k >= 0),
    )
    measured = certify("qwen3", transformers_cases(described("qwen3"), precisions=("32-true",)))
    failures = measured.failures_by_check()
    assert list(failures) == ["attention", "no future", "decoding", "padding", "canary"]
    assert failures["attention"][0].where.startswith("layer 0, head 0, query 0, key 1: weight ")
    assert failures["no future"][0].where == "query 0 changes with key 1, first in model.layers.0.self_attn"
    cases = {result.case.removesuffix(" precision=32-true") for result in failures["no future"]}
    assert cases >= {
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
    cases = transformers_cases(described("llama"), precisions=("32-true",))
    measured = [result for result in results(cases, attention="eager", weights="random") if not result.passed]
    assert [result.check for result in measured[:3]] == ["no future", "no future", "attention"]
    # layer 1 sees key 30, which depends on all keys up to 30; the first of them in the future is 6
    assert measured[0].where == "by perturbation: query 5 changes with key 6, first in model.layers.1.self_attn"
    assert measured[1].where == "by gradient: query 5 has a gradient with respect to key 6"
    assert measured[2].where.startswith("layer 1, head 2, query 5, key 30: weight ")


def of_window(window):
    """Mistral's mask with another window than in its config."""
    mask = modeling_mistral.create_sliding_window_causal_mask

    def other(*, config, **choices):
        config = copy.copy(config)
        config.sliding_window = window
        return mask(config=config, **choices)

    return other


@pytest.mark.parametrize("window, failures", [(7, {"all of the past"}), (9, {"no future", "attention", "decoding"})])
def test_a_window_other_than_in_the_config_is_found(window, failures, described, monkeypatch):
    monkeypatch.setattr(modeling_mistral, "create_sliding_window_causal_mask", of_window(window))
    measured = results(
        transformers_cases(described("mistral"), precisions=("32-true",)), attention="eager", weights="random"
    )
    assert failed(measured) - {"decoding"} == failures - {"decoding"}  # the cache has the window of the config
    first = {
        7: "query 13 does not depend on key 0",
        9: "by perturbation: query 15 changes with key 0 outside the window, first in model.layers.",
    }[window]
    assert any(result.where.startswith(first) for result in measured if not result.passed and result.length == 37)


def test_a_wrong_cache_fails_decoding_only(trained, monkeypatch):
    layer, kept = transformers.cache_utils.DynamicLayer, transformers.cache_utils.DynamicLayer.update

    def forgetful(self, *states, **choices):
        keys, values = kept(self, *states, **choices)
        return keys, torch.cat((values[..., :1, :] / 2, values[..., 1:, :]), dim=-2)

    monkeypatch.setattr(layer, "update", forgetful)
    measured = results(transformers_cases(str(trained[0]), precisions=("32-true",)), weights="trained")
    wrong = {result.where.partition(":")[0] for result in measured if not result.passed}
    assert failed(measured) == {"decoding"} and wrong == {"chunks of 1", "chunks of 7", "random chunks"}


def test_visible_padding_fails_padding_only(trained, monkeypatch):
    mask = modeling_gpt2.create_causal_mask

    def blind(*, attention_mask, **choices):
        return mask(attention_mask=None if attention_mask is None else torch.ones_like(attention_mask), **choices)

    monkeypatch.setattr(modeling_gpt2, "create_causal_mask", blind)
    measured = results(
        transformers_cases(str(trained[0]), precisions=("32-true",)), weights="trained", attention="eager"
    )
    wrong = [result.where for result in measured if not result.passed]
    assert failed(measured) == {"padding"} and [where.split()[2] for where in wrong] == ["18", "18", "36", "36"]


def test_a_copy_of_a_subject_runs_the_copied_model(trained):
    subject = TransformersSubject(copy.deepcopy(trained[1]))
    copied, ids = copy.deepcopy(subject), torch.arange(9)[None]
    before = subject(ids)
    torch.nn.init.zeros_(copied.module.transformer.ln_f.weight)
    torch.nn.init.zeros_(copied.module.transformer.ln_f.bias)
    assert (copied(ids) == 0).all() and torch.equal(subject(ids), before)
    exact = subject.in_float64()(ids)
    assert exact.dtype == torch.float64
    assert_close(before, exact)
