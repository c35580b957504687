"""scripts/sample.py as a user starts it, in this process where a separate one is not what is tested."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor import config as inductor_config

from tests.calls import call
from tests.conftest import assert_refused, run_python
from tests.model.test_checkpoint import language_model
from tril.data.cache import resolve_cache_dir
from tril.data.settings import build
from tril.model.checkpoint import load, save
from tril.model.generation.config import SamplingConfig
from tril.scripts.cli.compose import compose
from tril.scripts.cli.errors import message_of, pick_device
from tril.scripts.cli.typed import Typed
from tril.scripts.sample import TEXT_KEYS, Settings, compiles, main, removed, sample, show

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "sample.py"
HEAVY = ("lightning", "datasets", "wandb", "matplotlib", "scipy", "torch._dynamo")
# Runs the script and prints which of these packages it imported.
WATCHED = f"""
import runpy, sys
sys.argv[0] = {str(SCRIPT)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
print("imported:", *(name for name in {(*HEAVY, "torch")!r} if name in sys.modules), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory with a checkpoint below outputs/, which no test changes."""
    path = tmp_path_factory.mktemp("sample")
    torch.manual_seed(0)
    save(path / "outputs" / "run" / "checkpoints" / "best.ckpt", language_model())
    return path


def run(folder, *arguments):
    return call(main, *arguments, cwd=folder, strict=True)


def run_process(folder, *arguments, code):
    return run_python("-c", code, *arguments, cwd=folder)


def settings(*arguments):
    return compose("sample", Typed.of(arguments, TEXT_KEYS)).settings


def checked(*arguments):
    names = SamplingConfig.__dataclass_fields__
    return build(Settings, {key: value for key, value in settings(*arguments).items() if key not in names})


def read_prompts(*arguments):
    return checked(*arguments).prompts()


def test_a_sample_streams_from_latest_and_leaves_nothing_behind(folder):
    before = sorted(folder.rglob("*"))
    result = run(folder, "prompt=def ", "max_new_tokens=30", "seed=4", "device=cpu")
    assert result.returncode == 0, result.stderr
    expected = load(folder / "outputs" / "run").generate("def ", max_new_tokens=30, seed=4)
    assert result.stdout == f"def {expected}\n"
    assert result.stderr == f"{Path('outputs/run/checkpoints/best.ckpt')} on cpu\n"
    assert sorted(folder.rglob("*")) == before


def test_heads_may_be_removed_from_a_sample_and_no_other_library_is_imported(folder):
    options = ["prompt=def ", "max_new_tokens=30", "seed=4", "remove_heads=[L0H1, L1H3]", "device=cpu"]
    result = run_process(folder, *options, code=WATCHED)
    assert result.returncode == 0, result.stderr
    lm, gate = load(folder / "outputs" / "run"), torch.tensor([[1.0, 0, 1, 1], [1, 1, 1, 0]])
    expected = lm.generate("def ", max_new_tokens=30, seed=4, head_gate=gate)
    assert result.stdout == f"def {expected}\n" != f"def {lm.generate('def ', max_new_tokens=30, seed=4)}\n"
    assert result.stderr.splitlines() == [f"{Path('outputs/run/checkpoints/best.ckpt')} on cpu", "imported: torch"]
    message = "the model has no head 'L0H4'; with 2 layers of 4 heads, use L0H0 to L1H3"
    assert_refused(run(folder, "remove_heads=L0H4"), message)


def test_mistakes_are_one_line_with_status_2(folder):
    message = "temperature=-1 must be greater than or equal to 0; top_k=0 must be greater than or equal to 1"
    assert_refused(run(folder, "temperature=-1", "top_k=0"), message)
    assert_refused(run(folder, "max_new_tokens=0"), "max_new_tokens=0 must be greater than or equal to 1")
    assert_refused(run(folder, "+top_q=1"), "there is no setting top_q")


def test_a_missing_checkpoint_is_said_before_torch_is_imported(tmp_path):
    code = "import atexit\natexit.register(lambda: print('torch' in sys.modules))\n" + WATCHED
    result = run_process(tmp_path, "ckpt=nowhere", code=code)
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
    values = settings(f"prompt={text}", f"stop={text}")
    assert values["prompt"] == text == values["stop"]


def test_random_prompts_arrive_as_they_are_typed():
    draw = random.Random(0)
    for _ in range(10):
        texts = {key: "".join(draw.choice("\\'\"${}a \n,[]=") for _ in range(8)) + "." for key in TEXT_KEYS}
        values = settings(*(f"{key}={text}" for key, text in texts.items()))
        assert {key: values[key] for key in texts} == texts


def test_what_is_hydras_grammar_stays_so():
    assert settings("stop=null")["stop"] is None
    assert settings('prompt=["a, b", c]')["prompt"] == ["a, b", "c"]
    assert settings("prompt='a, b '")["prompt"] == settings('prompt="a, b "')["prompt"] == "a, b "
    assert settings("n=3", "top_p=null", "temperature=0.5")["n"] == 3
    assert settings("ckpt=runs/epoch=3, v{1}.ckpt")["ckpt"] == "runs/epoch=3, v{1}.ckpt"


def test_prompts(tmp_path):
    assert read_prompts() == [""]
    assert read_prompts("prompt=a", "n=2") == ["a", "a"]
    assert read_prompts("prompt=[a, b]", "n=2") == ["a", "a", "b", "b"]
    (tmp_path / "p.txt").write_text("läng\n", encoding="utf-8")
    assert read_prompts(f"prompt_file={tmp_path}/p.txt") == ["läng\n"]


def test_a_prompt_file_that_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="a.txt is not UTF-8"):
        read_prompts(f"prompt_file={tmp_path}/a.txt")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["n=0"], "n=0 must be greater than or equal to 1"),
        (["n=1.5"], "n=1.5 must"),
        (["prompt=[]"], "must be a text or a list of texts"),
        (["prompt=[1, 2]"], "quote numbers"),
        (["prompt=null"], "prompt=None must be a text"),
        (["prompt=a", "prompt_file=b"], "prompt and prompt_file are both set"),
        (["prompt_file=nowhere.txt"], "nowhere.txt"),
        (
            ["prompt=\udcff"],
            r"prompt='\\udcff' is not UTF-8",
        ),  # how Python represents a byte of the command line that is not UTF-8
        (["prompt=[a, '\udcff']"], r"prompt='\\udcff' is not UTF-8"),
    ],
)
def test_wrong_prompts(arguments, message):
    with pytest.raises((ValueError, OSError)) as error:
        read_prompts(*arguments)
    assert re.search(message, message_of(error.value))


def test_one_sample_comes_in_pieces_and_several_under_numbered_lines():
    lm, options = language_model(), {"max_new_tokens": 20, "seed": 0}
    streamed = list(sample(lm, ["a"], True, options))
    assert streamed[0] == "a" and streamed[-1] == "\n" and len(streamed) > 5
    assert "".join(streamed) == "".join(sample(lm, ["a"], False, options)) == f"a{lm.generate('a', **options)}\n"
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
    with pytest.raises(ValueError, match="compiling for CUDA needs a C compiler, which is not installed; install gcc"):
        compiles(True, "cuda", True)


def test_a_wrong_compile_is_refused_before_the_model_is_loaded(folder):
    assert settings()["compile"] == "auto"
    assert_refused(run(folder, "compile=maybe", "ckpt=nowhere"), "compile=maybe must be 'auto', True or False")
    assert_refused(run(folder, "compile=true", "use_cache=false", "device=cpu"), "compile=True needs use_cache=True")


def test_a_compiled_sample_says_so_and_keeps_its_code_next_to_the_data(folder):
    """The prompt's pass computes the first token, so nothing is compiled for one token."""
    result = run(folder, "compile=true", "max_new_tokens=1", "device=cpu")
    assert result.returncode == 0, result.stderr
    assert result.stderr.endswith("on cpu, compiled (the second token takes a while the first time)\n")
    expected = os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(resolve_cache_dir() / "compiled"))
    assert result.environment["TORCHINDUCTOR_CACHE_DIR"] == expected


def test_compiling_without_a_compiler_is_refused(folder):
    with inductor_config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        assert_refused(run(folder, "compile=true", "device=cpu"), "compiling for a CPU needs a C++ compiler")


@pytest.mark.parametrize(
    ("argument", "gate"),
    [("null", None), ("L1H0", [[1, 1, 1, 1], [0, 1, 1, 1]]), ("[L0H0, L0H3]", [[0, 1, 1, 0], [1] * 4])],
)
def test_the_gate_of_a_sample(argument, gate):
    options = removed(language_model(), settings(f"remove_heads={argument}")["remove_heads"])
    assert options == {} if gate is None else options["head_gate"].tolist() == gate


@pytest.mark.parametrize(("argument", "shown"), [("5", "'5'"), ("[L2H0, 7]", "'L2H0', '7'"), ("''", "''")])
def test_heads_that_are_not_there(argument, shown):
    with pytest.raises(ValueError, match=f"has no head {shown}; with"):
        removed(language_model(), settings(f"remove_heads={argument}")["remove_heads"])


def test_devices():
    assert pick_device("cpu") == "cpu"
    with pytest.raises(ValueError, match="device=tpu is not available; use auto, .*cpu"):
        pick_device("tpu")
    if not torch.cuda.is_available() and not torch.backends.mps.is_available():
        assert pick_device("auto") == "cpu"
