"""Four decoders have an encoder's mask since transformers 5.9 (transformers#48745); 5.23 has them repaired.

The test needs two Python interpreters that have Tril: TRIL_TRANSFORMERS_LEAKING with transformers 5.10, and
TRIL_TRANSFORMERS_REPAIRED with 5.23.
"""

import json
import os
import subprocess

import pytest

VARIABLES = ("TRIL_TRANSFORMERS_LEAKING", "TRIL_TRANSFORMERS_REPAIRED")
DECODERS = ("RoFormerForCausalLM", "BigBirdForCausalLM", "RemBertForCausalLM", "MegatronBertForCausalLM")
CONTROL = "BertLMHeadModel"
JUDGE = f"""
import json, warnings
warnings.simplefilter("ignore")
from tril.model.causality.class_verdict import judge
print(json.dumps({{name: judge(name) for name in {(*DECODERS, CONTROL)}}}))
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(os.environ.get, VARIABLES)), reason=f"needs interpreters in {' and '.join(VARIABLES)}"
    ),
]


def verdicts(variable, cwd):
    done = subprocess.run([os.environ[variable], "-c", JUDGE], cwd=cwd, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_leaking_release_fails_and_the_repaired_one_passes(tmp_path):
    leaking, repaired = (verdicts(variable, tmp_path) for variable in VARIABLES)
    for name in DECODERS:
        assert leaking[name]["verdict"].startswith("leak, "), leaking[name]
        assert ".encoder.layer.0.attention.self" in leaking[name]["failed"]["leak"]
        assert repaired[name]["verdict"] == "causal", repaired[name]
    assert leaking[CONTROL]["verdict"] == repaired[CONTROL]["verdict"] == "causal"
