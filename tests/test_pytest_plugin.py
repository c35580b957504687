"""The pytest plugin in throw-away projects: the fixture, the report, and what its import costs."""

import html
import re
from pathlib import Path

import pytest

from tests.conftest import run_python

PLUGIN = "tril.model.causality.pytest_plugin"
# A causal model adds the mean of all tokens before; a leaking one adds the next token.
MODEL = """
import torch
class Model(torch.nn.Module):
    def __init__(self, leaks=False):
        super().__init__()
        self.embed, self.head, self.leaks = torch.nn.Embedding(11, 16), torch.nn.Linear(16, 11), leaks
    def forward(self, ids):
        x = self.embed(ids)
        mean = x.cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None]
        return self.head(mean + (torch.roll(x, -1, 1) if self.leaks else 0))
"""
TESTS = """
import pytest
from model import Model
SIZES = dict(vocab_size=11, context_length=16, budget_seconds=1.0)
def test_causal(assert_causal):
    assert_causal(Model(), **SIZES)
"""
FAILING = """
@pytest.mark.parametrize("tag", ["</h2><script>alert(1)</script>"])
def test_leak(assert_causal, tag):
    assert_causal(Model(leaks=True), name="<img src=x onerror=alert(2)>", **SIZES)
def test_error(assert_causal):
    def broken(ids):
        raise RuntimeError("<b>no kernel</b> \\ud800")
    assert_causal(broken, **SIZES)
def test_without_a_certificate():
    pass
"""
# Libraries that a test with assert_causal does not wait for; pytest alone does not even wait for torch.
HEAVY = ("lightning", "hydra", "omegaconf", "wandb", "datasets", "transformers", "matplotlib", "scipy")


def run_pytest(folder: Path, *arguments: str):
    """Runs pytest with the plugin and pytest-xdist only, whether or not Tril is installed with its entry point."""
    plugins = ["-p", PLUGIN, "-p", "xdist", "-p", "no:cacheprovider"]
    variables = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTHONDONTWRITEBYTECODE": "1"}
    return run_python("-m", "pytest", "--rootdir", ".", *plugins, *arguments, cwd=folder, **variables)


def sections(page: str) -> dict[str, str]:
    """Test id -> its part of the report, as the text that a browser shows."""
    parts = re.findall(r"<section.*?</section>", page, re.DOTALL)
    titles = [html.unescape(re.findall(r"<h2>(.*?)</h2>", part)[0]) for part in parts]
    return {title: html.unescape(re.sub(r"<[^>]*>", " ", part)) for title, part in zip(titles, parts, strict=True)}


@pytest.fixture
def project(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "test_model.py").write_text(TESTS)
    return tmp_path


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """A session with a causal model, a leaking one and one that raises: (output, the report)."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "model.py").write_text(MODEL)
    (folder / "test_model.py").write_text(TESTS + FAILING)
    done = run_pytest(folder, "--causal-report=new/report.html")
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout, (folder / "new" / "report.html").read_text(encoding="utf-8")


def test_a_causal_model_passes_and_nothing_is_written_without_the_option(project):
    done = run_pytest(project)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
    assert {path.name for path in project.iterdir()} == {"model.py", "test_model.py"}


def test_a_leak_fails_its_test_with_query_and_key_at_the_line_of_the_test(failed):
    output, _ = failed
    assert "2 failed, 2 passed" in output
    failure = output[output.index("_ test_leak[") : output.index("_ test_error ")]
    assert 'assert_causal(Model(leaks=True), name="<img src=x onerror=alert(2)>", **SIZES)' in failure
    assert (
        "AssertionError: <img src=x onerror=alert(2)> is NOT certified" in failure and "pytest_plugin.py" not in failure
    )
    query, key = map(int, re.findall(r"query (\d+) changes with key (\d+)", failure)[0])
    assert key == query + 1  # the model reads the next token


def test_the_report_shows_every_certificate_with_failures_first(failed):
    _, page = failed
    found = sections(page)
    names = ["test_leak[</h2><script>alert(1)</script>]", "test_error", "test_causal"]
    assert list(found) == [f"test_model.py::{name}" for name in names]
    leak, error, causal = found.values()
    assert "not certified" in leak and "<img src=x onerror=alert(2)>" in leak and "no future" in leak
    assert re.search(r"query (\d+) changes with key (\d+)", leak)
    assert "no verdict" in error and "test_error.<locals>.broken could not be tested" in error
    assert "RuntimeError: <b>no kernel</b>" in error
    assert "certified" in causal and "not certified" not in causal and "First failure" not in causal
    assert re.search(r"in \d+\.\d s", causal) and "length 1, 2, 8, 16" in causal and "torch 2." in causal
    assert "Not applicable: attention, reference, decoding, padding, generation, documents." in causal
    assert "evaluation mode, training mode" in causal
    assert (
        "3 models tested: 1 certified, 1 not certified, 1 no verdict." in page and "pytest ended with status 1" in page
    )


def test_the_report_escapes_every_text_and_loads_nothing(failed):
    _, page = failed
    assert "<script" not in page and "<img" not in page and "<b>" not in page
    assert not re.search(r"(src|href)\s*=\s*[\"']", page) and "http" not in page.replace("http-equiv", "")
    assert "default-src 'none'" in page


@pytest.mark.slow
def test_the_report_holds_the_tests_of_all_workers_of_xdist(project):
    (project / "test_again.py").write_text(TESTS)
    done = run_pytest(project, "-n2", "--causal-report=report.html")
    assert done.returncode == 0, done.stdout + done.stderr
    found = sections((project / "report.html").read_text(encoding="utf-8"))
    assert set(found) == {"test_model.py::test_causal", "test_again.py::test_causal"}


@pytest.mark.parametrize(
    "name, message",
    [
        ("test_model.py", "would be replaced by a page; use a name that ends in .html"),
        ("folder.html", "is a folder; use the name of a file in it"),
        ("model.py/report.html", "cannot be written: "),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_first_test(project, name, message):
    (project / "folder.html").mkdir()
    done = run_pytest(project, f"--causal-report={name}")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR and done.stdout == ""
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("ERROR: --causal-report=") and message in line
    assert (project / "test_model.py").read_text() == TESTS


def test_collecting_tests_imports_no_torch_and_keeps_an_old_report(project):
    (project / "report.html").write_text("old")
    (project / "test_model.py").write_text("def test(assert_causal): ...")
    code = "import pytest, sys; pytest.main(sys.argv[1:]); print('loaded', [n for n in {names} if n in sys.modules])"
    arguments = ["-p", PLUGIN, "-p", "no:cacheprovider", "--causal-report=report.html"]
    code = code.format(names=("torch", "jinja2", *HEAVY))
    variables = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = run_python("-c", code, *arguments, "--collect-only", cwd=project, **variables)
    assert "1 test collected" in done.stdout and done.stdout.endswith("loaded []\n"), done.stdout + done.stderr
    assert (project / "report.html").read_text() == "old"


def test_certifying_imports_no_library_of_training(project):
    code = """
import sys
from model import Model
from tril.model.causality import certify
assert certify(Model(), vocab_size=11, context_length=4, budget_seconds=0.1).passed
print("loaded", [n for n in {names} if n in sys.modules])
"""
    done = run_python("-c", code.format(names=HEAVY), cwd=project)
    assert done.stdout == "loaded []\n", done.stderr
