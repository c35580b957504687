"""The script as a user starts it, in a process of its own; what needs none is tested without."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from tests.conftest import assert_refused, run_python
from tests.model.test_checkpoint import language_model
from tril.data.cache import default_cache_dir
from tril.model.checkpoint import load, save
from tril.scripts.common.cli import CONFIGS, pick_device, plain, quoted
from tril.scripts.sample import TEXTS, compiles, read_prompts, removed, sample, show

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "sample.py"
HEAVY = ("lightning", "datasets", "wandb", "matplotlib", "scipy", "torch._dynamo")
# Runs the script and then says which of these packages it imported.
WATCHED = f"""
import runpy, sys
sys.argv[0] = {str(SCRIPT)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
print("imported:", *(name for name in {(*HEAVY, "torch")!r} if name in sys.modules), file=sys.stderr)
"""


@pytest.fixture
def folder(tmp_path):
    save(tmp_path / "outputs" / "run" / "checkpoints" / "best.ckpt", language_model())
    return tmp_path


def run(folder, *arguments, code=None):
    return run_python(*(["-c", code] if code else [SCRIPT]), *arguments, cwd=folder)


def settings(*arguments):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return plain(compose("sample", overrides=[quoted(argument, TEXTS) for argument in arguments]))


def test_a_sample_streams_from_latest_and_leaves_nothing_behind(folder):
    before = sorted(folder.rglob("*"))
    result = run(folder, "prompt=def ", "max_new_tokens=30", "seed=4", "device=cpu", code=WATCHED)
    assert result.returncode == 0, result.stderr
    expected = load(folder / "outputs" / "run").generate("def ", max_new_tokens=30, seed=4)
    assert result.stdout == f"def {expected}\n"
    assert result.stderr.splitlines() == [f"{Path('outputs/run/checkpoints/best.ckpt')} on cpu", "imported: torch"]
    assert sorted(folder.rglob("*")) == before


def test_mistakes_are_one_line_with_status_2(folder):
    result = run(folder, "temperature=-1", "top_k=0", "max_new_tokens=0")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert "temperature=-1" in result.stderr and "top_k=0" in result.stderr


def test_a_missing_checkpoint_is_said_before_torch_is_imported(tmp_path):
    result = run(
        tmp_path,
        "ckpt=nowhere",
        code="import atexit\natexit.register(lambda: print('torch' in sys.modules))\n" + WATCHED,
    )
    assert (result.returncode, result.stdout) == (2, "False\n")
    assert result.stderr.startswith("error: ") and "nowhere" in result.stderr and result.stderr.count("\n") == 1


def test_a_reader_may_stop_reading(folder):
    command = [sys.executable, str(SCRIPT), "max_new_tokens=5000", "device=cpu"]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(60) == 0 and errors.count(b"\n") == 1, errors


def test_control_c_ends_a_sample(capsys):
    def pieces():
        yield "text"
        raise KeyboardInterrupt

    show(pieces())
    assert capsys.readouterr().out == "text\n"


@pytest.mark.parametrize(
    "text",
    [
        "def ",
        " x ",
        "a, b",
        "print(x",
        "x = {",
        "it's",
        '"Yes," she said. "No."',
        "null ",
        "5",
        "a=b",
        "${name} and \\${b}",
        "back\\",
        "\\'",
        "tab\tand\nline\n",
        "back\\\n",
        "[1, 2",
        "",
        "{}",
        "?",
        "é😀",
    ],
)
def test_prompts_arrive_as_they_are_typed(text):
    assert settings(f"prompt={text}", f"stop={text}")["prompt"] == text == settings(f"stop={text}")["stop"]


def test_random_prompts_arrive_as_they_are_typed():
    draw = random.Random(0)
    for _ in range(40):
        text = "".join(draw.choice("\\'\"${}a \n,[]=") for _ in range(8)) + "."
        assert settings(f"prompt={text}")["prompt"] == text


def test_what_is_hydras_grammar_stays_so():
    assert settings("stop=null")["stop"] is None
    assert settings('prompt=["a, b", c]')["prompt"] == ["a, b", "c"]
    assert settings("prompt='a, b '")["prompt"] == settings('prompt="a, b "')["prompt"] == "a, b "
    assert settings("n=3", "top_p=null", "temperature=0.5")["n"] == 3
    assert settings("ckpt=runs/epoch=3, v{1}.ckpt")["ckpt"] == "runs/epoch=3, v{1}.ckpt"
    assert [quoted(argument, TEXTS) for argument in ("--help", "n=3", "prompt")] == ["--help", "n=3", "prompt"]


def test_prompts(tmp_path):
    assert read_prompts(settings()) == [""]
    assert read_prompts(settings("prompt=a", "n=2")) == ["a", "a"]
    assert read_prompts(settings("prompt=[a, b]", "n=2")) == ["a", "a", "b", "b"]
    (tmp_path / "p.txt").write_text("läng\n", encoding="utf-8")
    assert read_prompts(settings(f"prompt_file={tmp_path}/p.txt")) == ["läng\n"]


def test_a_prompt_file_that_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="a.txt is not UTF-8"):
        read_prompts(settings(f"prompt_file={tmp_path}/a.txt"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["n=0"], "n=0 must be a whole number, at least 1"),
        (["n=1.5"], "n=1.5 must"),
        (["prompt=[]"], "must be a text or a list of texts"),
        (["prompt=[1, 2]"], "quote numbers"),
        (["prompt=null"], "prompt=None must be a text"),
        (["prompt=a", "prompt_file=b"], "prompt and prompt_file are both given"),
        (["prompt_file=nowhere.txt"], "nowhere.txt"),
        (
            ["prompt=\udcff"],
            r"prompt='\\udcff' is not UTF-8",
        ),  # how Python hands on a byte of the command line that is no character
        (["prompt=[a, '\udcff']"], r"prompt='\\udcff' is not UTF-8"),
    ],
)
def test_wrong_prompts(arguments, message):
    with pytest.raises((ValueError, OSError), match=message):
        read_prompts(settings(*arguments))


def test_one_sample_comes_in_pieces_and_several_under_numbered_lines():
    lm, options = language_model(), {"max_new_tokens": 20, "seed": 0}
    alone = list(sample(lm, ["a"], True, options))
    assert alone[0] == "a" and alone[-1] == "\n" and len(alone) > 5
    assert "".join(alone) == "".join(sample(lm, ["a"], False, options)) == f"a{lm.generate('a', **options)}\n"
    texts = lm.generate(["a", "a", "bc"], **options)
    expected = f"--- 1/3 ---\na{texts[0]}\n--- 2/3 ---\na{texts[1]}\n--- 3/3 ---\nbc{texts[2]}\n"
    assert "".join(sample(lm, ["a", "a", "bc"], True, options)) == expected


@pytest.mark.parametrize(
    ("argument", "device", "use_cache", "able", "compiled"),
    [
        ("auto", "cuda", True, True, True),
        ("auto", "cuda", True, False, False),
        ("auto", "cuda", False, True, False),
        ("auto", "cpu", True, True, False),
        ("auto", "mps", True, True, False),
        ("true", "cpu", True, False, True),
        ("false", "cuda", True, True, False),
        ("true", "cuda", True, True, True),
        ("false", "cuda", True, False, False),
    ],
)
@pytest.mark.parametrize("lacking", ["triton", "compiler"])
def test_auto_compiles_where_it_becomes_a_cuda_graph(argument, device, use_cache, able, lacking, compiled, monkeypatch):
    monkeypatch.setattr("tril.model.training.hardware.has_triton", lambda: able or lacking != "triton")
    monkeypatch.setenv("CC", sys.executable if able or lacking != "compiler" else "no-such-compiler")
    assert compiles(settings(f"compile={argument}")["compile"], device, use_cache) is compiled


def test_compiling_for_cuda_without_a_compiler_is_refused(monkeypatch):
    monkeypatch.setattr("tril.model.training.hardware.has_triton", lambda: True)
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(ValueError, match="compiling for CUDA needs a C compiler, which is not there; install gcc"):
        compiles(True, "cuda", True)


def test_a_wrong_compile_is_refused_before_the_model_is_loaded(folder):
    assert settings()["compile"] == "auto"
    assert_refused(run(folder, "compile=maybe"), "compile=maybe must be auto, true or false")
    assert_refused(run(folder, "compile=true", "use_cache=false", "device=cpu"), "compile=True needs use_cache=True")


def test_a_compiled_sample_says_so_and_keeps_its_code_beside_the_data(folder):
    """One token is that of the prompt's pass: nothing is compiled for it."""
    code = WATCHED + "import os\nprint(os.environ['TORCHINDUCTOR_CACHE_DIR'], file=sys.stderr)\n"
    result = run(folder, "compile=true", "max_new_tokens=1", "device=cpu", code=code)
    assert result.returncode == 0, result.stderr
    first, _, kept = result.stderr.splitlines()
    assert first.endswith("on cpu, compiled (the second token takes a while the first time)")
    assert kept == os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(default_cache_dir() / "compiled"))


def test_compiling_without_a_compiler_is_refused(folder, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert_refused(run(folder, "compile=true", "device=cpu"), "compiling for a CPU needs a C++ compiler")


def test_heads_may_be_left_out_of_a_sample(folder):
    result = run(
        folder, "prompt=def ", "max_new_tokens=30", "seed=4", "remove_heads=[L0H1, L1H3]", "device=cpu", code=WATCHED
    )
    assert result.returncode == 0, result.stderr
    lm, gate = load(folder / "outputs" / "run"), torch.tensor([[1.0, 0, 1, 1], [1, 1, 1, 0]])
    expected = lm.generate("def ", max_new_tokens=30, seed=4, head_gate=gate)
    assert result.stdout == f"def {expected}\n" != f"def {lm.generate('def ', max_new_tokens=30, seed=4)}\n"
    assert result.stderr.endswith("imported: torch\n")  # and neither matplotlib nor scipy
    assert_refused(
        run(folder, "remove_heads=L0H4"),
        "the model has no head 'L0H4'; it has 2 layers of 4 heads, called L0H0 to L1H3",
    )


@pytest.mark.parametrize(
    ("argument", "gate"),
    [
        ("null", None),
        ("L1H0", [[1, 1, 1, 1], [0, 1, 1, 1]]),
        ("[]", [[1] * 4] * 2),
        ("[L0H0, L0H3]", [[0, 1, 1, 0], [1] * 4]),
    ],
)
def test_the_gate_of_a_sample(argument, gate):
    found = removed(language_model(), settings(f"remove_heads={argument}")["remove_heads"])
    assert found == {} if gate is None else found["head_gate"].tolist() == gate


@pytest.mark.parametrize(("argument", "shown"), [("5", "'5'"), ("[L2H0, 7]", "'L2H0', '7'"), ("''", "''")])
def test_heads_that_are_not_there(argument, shown):
    with pytest.raises(ValueError, match=f"has no head {shown}; it has"):
        removed(language_model(), settings(f"remove_heads={argument}")["remove_heads"])


def test_devices():
    assert pick_device("cpu") == "cpu"
    with pytest.raises(ValueError, match="device=tpu is not available; here are auto, .*cpu"):
        pick_device("tpu")
    if not torch.cuda.is_available() and not torch.backends.mps.is_available():
        assert pick_device("auto") == "cpu"
