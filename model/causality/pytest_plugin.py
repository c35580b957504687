"""The pytest plugin: the fixture `assert_causal`, and `pytest --causal-report=FILE.html`.

pytest loads it in every project of an environment that has Tril, so it imports nothing but pytest and the standard
library until a test uses the fixture.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

VERDICTS = ("certified", "inconclusive", "not certified", "no verdict")
RECORDS = pytest.StashKey[list[dict]]()  # of a test: what it certified, as plain values
ATTRIBUTE = "tril_certificates"  # of a test's report, which pytest-xdist sends from the workers
# Modules of the package `tril` that pytest takes for modules of the top level, see `pytest_addoption`
FOLDERS = {"model", "data", "scripts", "train"}
MANY = 8  # lengths that a line of the report lists one by one


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    group = parser.getgroup("tril", "causality certificates")
    group.addoption(
        "--causal-report", metavar="FILE.html", help="write the certificates of all tests that use assert_causal"
    )
    # pytest rewrites the assertions in all modules of a distribution with a plugin. It takes them from the list of the
    # wheel's files, without the first folder where no module lies outside of it, so a user's own model.py would be
    # rewritten; torch.compile(fullgraph=True) then fails at assertions on tensors. pytest has no option against this.
    hook = getattr(pluginmanager, "rewrite_hook", None)
    getattr(hook, "_must_rewrite", set()).difference_update(FOLDERS)


def pytest_configure(config: pytest.Config) -> None:
    name = config.option.causal_report
    if name is None or config.option.collectonly or hasattr(config, "workerinput"):  # a worker of pytest-xdist
        return
    path = config.invocation_params.dir / Path(name).expanduser()
    check_path(path)
    config.pluginmanager.register(CausalReport(path), "tril_causal_report")


def check_path(path: Path) -> None:
    """Creates the folder of the report.

    Raises:
        pytest.UsageError: the report cannot be written there.
    """
    if path.suffix.lower() not in (".html", ".htm"):  # as in `--causal-report tests/test_model.py`
        raise pytest.UsageError(f"--causal-report={path} would be replaced by a page; use a name that ends in .html")
    if path.is_dir():
        raise pytest.UsageError(f"--causal-report={path} is a folder; use the name of a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        reason = error.strerror or error
        raise pytest.UsageError(f"--causal-report={path} cannot be written: {reason}; use another folder") from error


@pytest.fixture
def assert_causal(request: pytest.FixtureRequest) -> Callable[..., None]:
    """A function that fails the test if an output of a model depends on the future: `assert_causal(model, ...)`.

    Arguments are those of `tril.model.causality.certify`; vocab_size and context_length are those of `model.config` by
    default. `pytest --causal-report=FILE.html` collects the certificates.
    """
    records = request.node.stash.setdefault(RECORDS, [])

    def assert_causal(model: Callable[..., Any], **arguments: Any) -> None:
        __tracebackhide__ = True  # the failure is shown at the line of the test
        from tril.model.causality import certify

        started = time.perf_counter()
        try:
            certificate = certify(model, **arguments)
        except Exception as error:
            name = arguments.get("name") or getattr(model, "__qualname__", type(model).__name__)
            record = {"verdict": "no verdict", "sentence": f"{name} could not be tested"}
            seconds = time.perf_counter() - started
            records.append(record | {"seconds": seconds, "failed": [f"{type(error).__name__}: {error}"]})
            raise
        records.append(describe(certificate))
        if not certificate.passed:
            raise AssertionError(f"{certificate.verdict()}\n{certificate}")  # pytest's summary shows the first line

    return assert_causal


def describe(certificate) -> dict:
    """What the report shows of a certificate, as plain values, which pytest-xdist can send."""
    from tril.model.causality.certificate import ALL_CHECKS, CHECKS

    checks = []
    for name in certificate.checks():
        results = [result for result in certificate.results if result.check == name]
        failed, compared = sum(not r.passed for r in results), sum(r.tested for r in results)
        row = {"name": name, "what": ALL_CHECKS[name], "runs": len(results), "failed": failed, "compared": compared}
        checks.append(row)
    lengths: dict[str, set[int]] = {}
    for result in certificate.results:
        lengths.setdefault(result.case, set()).add(result.length)
    values = certificate.to_dict()
    passed = "inconclusive" if certificate.undecided else "certified"
    return {
        "verdict": passed if certificate.passed else "not certified",
        "sentence": certificate.verdict(),
        "scope": certificate.scope() if certificate.results else "",
        "seconds": float(certificate.seconds),
        "failed": list(map(str, values["failed"])),
        "checks": checks,
        "not_applicable": [name for name in CHECKS if name not in certificate.checks()],
        "cases": [{"case": case, "lengths": in_words(sorted(found))} for case, found in lengths.items()],
        "notes": list(map(str, values["notes"])),
        "versions": values["versions"],
    }


def in_words(lengths: list[int]) -> str:
    if len(lengths) > MANY:
        return f"{len(lengths)} lengths from {lengths[0]} to {lengths[-1]}"
    return ", ".join(map(str, lengths))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "teardown" and item.stash.get(RECORDS, None):
        setattr(report, ATTRIBUTE, item.stash[RECORDS])
    return report


class CausalReport:
    """Collects the certificates of a session, and writes them as one page at its end."""

    def __init__(self, path: Path):
        self.path = path
        self.records: list[dict] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.records += [{"test": report.nodeid} | record for record in getattr(report, ATTRIBUTE, [])]

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # after the summary, so that an error is the last line
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Generator[None, None, None]:
        yield
        try:
            write_report(self.path, self.records, int(exitstatus))
        except OSError as error:
            raise pytest.UsageError(f"--causal-report={self.path} cannot be written: {error}") from error
        terminal = session.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            terminal.write_line(f"causal report: {self.path}")


def write_report(path: Path, records: list[dict], exit_status: int) -> None:
    """Writes one file that needs neither network nor scripts; all texts are escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from tril.model.atomic_files import atomic_path

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    failures_first = sorted(records, key=lambda record: record["verdict"] == "certified")
    counts = Counter(record["verdict"] for record in records)
    values = {"records": failures_first, "counts": [(v, counts[v]) for v in VERDICTS if counts[v]]}
    values |= {"exit_status": exit_status, "date": time.strftime("%Y-%m-%d %H:%M:%S")}
    page = environment.get_template("causal_report.html").render(values)
    with atomic_path(path) as part:  # xmlcharrefreplace: for half of a surrogate pair
        part.write_text(page, encoding="utf-8", errors="xmlcharrefreplace", newline="\n")
