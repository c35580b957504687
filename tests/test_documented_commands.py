"""README.md and docs: every command has valid settings, and examples, links and the notebook are whole.

The Python examples run as they are, but for the size of models. The tests of README.md are everyday tests, those of the
other pages slow ones.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import io
import json
import re
import shutil
import sys
import tomllib
from typing import get_args, get_type_hints

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

import tril.model
from tests.contract.harness import TINY
from tests.documented import COMPUTED, EDITED, PAGES, ROOT, blocks, commands
from tests.foreign import folder_of
from tril.model import causal_mask, config, masks, positions
from tril.model.causality import assert_causal
from tril.model.gpt import GPT, GPTConfig
from tril.scripts.cli import app
from tril.scripts.cli.app import compose
from tril.scripts.cli.config import RunConfig

COMMANDS = [command for page in PAGES for command in commands(page)]
ADDED = "log", "none"  # the value that add_your_own.md adds, and one that exists
QUOTED = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.")
GLOB = re.compile(r"[][*?{}~^]")  # zsh refuses an unquoted pattern that matches no file
TINY_MODELS = {'"model=nano", "trainer.max_steps=100"': ", ".join(map(repr, (*TINY, "data.path=text.txt")))}
WITH_EXAMPLES = [page for page in PAGES if page.name not in (COMPUTED, EDITED) and blocks(page, "python")]
LINK = re.compile(r"\]\((?!https?:)([^)#\s{}]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
TOUR = ROOT / "docs" / "tour.ipynb"
ATTENTION = (ROOT / "docs" / COMPUTED).read_text(encoding="utf-8")
DECIMAL = re.compile(r"-?\d+\.\d+")
EXAMPLE = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
STEP = re.compile(r"^(?:\|[^|\n]+){3}\| `([^`]+)` \|$", re.MULTILINE)  # the fourth column of a table, "code"
MODEL = "import functools, torch\n\nLSTM = functools.partial(torch.nn.Embedding, 65, 65)\n"  # quick to certify


def here(word):
    """A word of a command with a path that exists, and a position scheme that exists."""
    if word.startswith("data.path="):
        return f"data.path=here.{'jsonl' if 'jsonl' in word else 'txt'}"
    return word.replace(*ADDED) if "model.pos" in word else word


@functools.cache
def accept(name, *settings):
    """Composes and checks the settings of a command as the program does, of a grid each value, and runs nothing."""
    importlib.import_module("tril.train" if name == "train" else f"tril.scripts.{name}")
    elsewhere = ("-", "+ablation=", "hydra/", "hydra.launcher.")  # tests/test_configs.py has the ablations
    rows = [[word for word in settings if not word.startswith(elsewhere)]]
    if "-m" in settings:
        columns = [swept(override) for override in OverridesParser.create().parse_overrides(rows[0])]
        rows = [[values[i % len(values)] for values in columns] for i in range(max(map(len, columns)))]
    for row in rows:
        composed = compose(name, list(row))
        own = composed.own(app.COMMANDS[name].own)
        if name == "train" and not (own.resume or own.init_from):
            RunConfig.of(composed.settings, composed.given)


def swept(override):
    if not override.is_sweep_override():
        return [override.input_line]
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def everyday_of_readme(pages):
    return [pytest.param(page, marks=[pytest.mark.slow] * (page.name != "README.md")) for page in pages]


@pytest.mark.parametrize("page", everyday_of_readme(PAGES))
def test_the_settings_of_the_commands_of_a_page_are_valid(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("here.txt", "here.jsonl"):
        (tmp_path / name).touch()
    for script, *words in {(command.script, *command.words[2:]) for command in commands(page) if command.script}:
        accept(script, *(here(word) for word in words if word[0] != "$"))


def test_no_shell_expands_a_command_and_other_programs_get_what_exists():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = settings["project"]
    markers = [marker.partition(":")[0] for marker in settings["tool"]["pytest"]["ini_options"]["markers"]]
    [hook] = blocks(ROOT / "docs/certify_your_model.md", "yaml")  # of pre-commit
    assert re.findall(r"entry: (.*)", hook)[0] in [command.text for command in COMMANDS if command.script]
    for command in COMMANDS:
        program, *words = command.words
        if command.script:
            typed = QUOTED.sub("", command.text).partition(" #")[0]
            assert not GLOB.search(typed), f"{command.page}: quote the value in {command.text}"
        elif program == "pip":
            assert set(re.findall(r"\[(\w+)\]", command.text)) <= set(project["optional-dependencies"])
            assert [word for word in words if word.startswith("torch")] <= project["dependencies"]
        elif program == "python" and words[0] == "-m":
            assert importlib.util.find_spec(words[1])
        elif program == "pytest" and "-m" in words:
            assert words[words.index("-m") + 1] in markers


@pytest.fixture(scope="module")
def folder(tmp_path_factory, run_of):
    """A working directory with the files that the examples name."""
    folder = tmp_path_factory.mktemp("documented")
    (folder / "text.txt").write_text("".join(f"line {i}: the square of {i} is {i * i}.\n" for i in range(400)))
    (folder / "model.py").write_text(MODEL)
    shutil.copytree(run_of("data.tokenizer.kind=byte"), folder / "outputs/2026-11-20/12-00-00")
    folder_of("SmolLM", folder / "FOLDER")
    return folder


@pytest.mark.parametrize("page", everyday_of_readme(WITH_EXAMPLES))
def test_the_python_examples_of_a_page_run(page, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("TRIL_CACHE", str(folder / "cache"))
    names = {}
    for example in blocks(page, "python"):
        for written, here in TINY_MODELS.items():
            example = example.replace(written, here)
        exec(compile(example, page.name, "exec"), names)
    for name, test in names.items():
        if name.startswith("test_"):
            test(assert_causal)  # the fixture, see tests/test_package.py
    sys.modules.pop("model", None)  # of certify_your_model.md


def slugs(page) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_somewhere_and_readme_leads_to_every_page():
    cells = json.loads(TOUR.read_text(encoding="utf-8"))["cells"]
    texts = {page: page.read_text(encoding="utf-8") for page in (*PAGES, ROOT / "CONTRIBUTING.md")}
    texts[TOUR] = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    for page, text in texts.items():
        for path, anchor in LINK.findall(text):
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page.name} links to {path}, which does not exist"
            if anchor and target.suffix == ".md":
                assert anchor in slugs(target), f"{page.name} links to #{anchor}, which {target.name} does not have"
    linked = {path for path, _ in LINK.findall(texts[ROOT / "README.md"])}
    assert {page.relative_to(ROOT).as_posix() for page in PAGES if page.parent.name == "docs"} <= linked


def test_the_stored_outputs_of_the_notebook_are_complete():
    """`tests/contract` executes it, and compares what it finds."""
    cells = [cell for cell in json.loads(TOUR.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)] and TOUR.stat().st_size < 300_000
    assert not [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]


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


def test_each_example_of_the_page_on_attention_prints_the_text_below_it():
    names: dict[str, object] = {}
    torch.manual_seed(0)
    try:
        for code, written in EXAMPLE.findall(ATTENTION):
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(code, names)
            printed = output.getvalue()
            assert DECIMAL.sub("#", written) == DECIMAL.sub("#", printed)
            numbers = [[float(number) for number in DECIMAL.findall(text)] for text in (written, printed)]
            assert numbers[0] == pytest.approx(
                numbers[1], rel=0, abs=1.5e-4
            )  # another CPU may round a digit differently
    finally:
        torch.set_printoptions(profile="default")  # the page sets them


def test_the_code_that_the_page_on_attention_quotes_exists():
    code, steps = (ROOT / "model" / "attention.py").read_text(encoding="utf-8"), STEP.findall(ATTENTION)
    assert len(steps) == 12
    for step in steps:
        assert code.count(f"{step}\n") + code.count(f"{step}  #") == 1, step
