"""FSDP2, tensor parallelism and both at once compute what one process computes: 2 and 4 processes on a CPU, float32."""

import json

import pytest

from tests.model.training.divided_models import CASES
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("parallel")  # one process of pytest-xdist has the costly fixture

LAYOUTS = {"fsdp": (2, 1), "tp": (2, 2), "fsdp and tp": (4, 2)}  # processes, and tensor ranks among them
LIMIT = 1e-5  # relative to the largest element: sums in another order, 100 roundings of float32


@pytest.fixture(scope="module", params=LAYOUTS)
def found(request, tmp_path_factory):
    n_ranks, tensor_ranks = LAYOUTS[request.param]
    path = tmp_path_factory.mktemp("parallel") / "found.json"
    run_ranks(n_ranks, "tests.model.training.divided_models", str(tensor_ranks), path)
    return json.loads(path.read_text()) | {"processes": n_ranks}


def test_initial_weights_from_the_meta_device_are_those_of_one_process_to_the_bit(found):
    assert [found[case]["initial"] for case in CASES] == [0.0] * len(CASES)


def test_losses_and_gradients_are_those_of_one_process(found):
    for case in CASES:
        for name in ("loss 0", "gradient 0", "loss 1", "gradient 1", "loss 2", "gradient 2"):
            assert found[case][name] <= LIMIT, (case, name, found[case])


def test_muon_and_adamw_make_the_updates_of_one_process(found):
    for case in CASES:
        assert found[case]["weights"] <= LIMIT, (case, found[case])


def test_the_gathered_copy_computes_the_logits_of_the_whole_model(found):
    for case in CASES:
        assert found[case]["copy"] <= LIMIT, (case, found[case])


def test_each_process_holds_its_share(found):
    """Norms and biases of rows are held by every tensor rank, and uneven rows are rounded up."""
    for case in CASES:
        assert found[case]["share"] <= 1.1 / found["processes"], (case, found[case])
