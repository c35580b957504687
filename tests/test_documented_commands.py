"""README.md and docs: every command is accepted, up to where it would compute something; examples, links, notebook.

The Python examples run as they are, but for the size of models. Those of README.md are everyday tests, those of the
other pages slow ones.
"""

import importlib
import importlib.util
import json
import re
import shutil
import sys
import tomllib

import pytest

from tests.contract.harness import BARE, TINY, merged
from tests.documented import COMPUTED, EDITED, PAGES, QUOTED, ROOT, Command, blocks, commands
from tests.model.interop.folders import folder_of
from tests.model.interop.nanogpt_files import reference, write_checkpoint, write_meta
from tests.model.tokenizers import byte_tokenizer
from tests.scripts.experiments.synthetic import write_sweep
from tril.model.causality import assert_causal

COMMANDS = commands(page for page in PAGES if page.name != EDITED)
OF_TRIL = list({command.words: command for command in reversed(COMMANDS) if command.script}.values())
GRIDS = ("scripts.experiments.grid.estimate_runs", "scripts.experiments.launch.known_sweep")  # the second on clusters
ACCEPTED = {  # what each script calls when it has accepted its settings
    "train": ("data.datamodule.TextDataModule.prepare_data", *GRIDS),
    "certify": ("model.causality.certificate.certify_model",),
    "evaluate": (*("scripts.evaluate.evaluated_texts", "model.evaluation.task_model.run_tasks"),),
    "export": ("model.interop.hf_export.export_hf",),
    "heads": ("scripts.experiments.trained_heads.log", "scripts.experiments.trained_heads.describe_sweep"),
    "play": ("scripts.playground.server.create_server",),
    "referee": ("scripts.experiments.referee.judge",),
    "report": ("scripts.experiments.report.losses_of",),
    "sample": ("model.checkpoint.load",),
}
STANDS_FOR = {"hf=my-model": "hf=FOLDER", "hf=ORG/NAME": "hf=FOLDER"}  # words of commands: what they are here
CANNOT_START = {"init_from=hf:HuggingFaceTB/SmolLM2-135M"}  # it needs the network
OTHER_PROGRAMS = ("pip", "pytest", "git", "(cd", "cat", "python", "torchrun")
GLOB = re.compile(r"[][*?{}~^]")  # zsh refuses an unquoted pattern that matches no file
TINY_MODELS = {'"model=nano", "trainer.max_steps=100"': ", ".join(map(repr, (*TINY, "data.path=text.txt")))}
LINK = re.compile(r"\]\((?!https?:)([^)#\s{}]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
TOUR = ROOT / "docs" / "tour.ipynb"

RUN = "outputs/2026-11-20/12-00-00"  # of model=llama, which all scripts accept; it is the newest one
COPIES = ("outputs/2026-11-23/12-00-00", "RUN", "checkpoint")
SMALL = ("model=llama", "model.n_layers=3", "model.n_heads=4", "model.n_kv_heads=2", "data.val_fraction=0.5")
TEXTS = "text.txt my.txt before.txt code.txt input.txt FILE repeats.txt a.txt notes/a.md posts/b.txt".split()
TEXT = "".join(f"line {i}: the square of {i} is {i * i}.\n" for i in range(400))
# A model that is quick to certify, in place of the reader's
MODEL = "import functools, torch\n\nLSTM = functools.partial(torch.nn.Embedding, 65, 65)\nfunction = logits = LSTM()\n"


class Accepted(BaseException):
    """Raised in place of the computation; no handler of the scripts catches it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory with every file that the commands name."""
    folder = tmp_path_factory.mktemp("documented")
    rows = {
        "posts.jsonl": [{"body": f"Post {i} is about {i * i}.\n" * 9} for i in range(60)],
        "FILE.jsonl": [{"good": "line 3", "bad": "enil 3"}],
    }
    files = {name: f"{name}\n{TEXT}" for name in TEXTS} | {"start.txt": "line 3", "model.py": MODEL}
    files |= {name: "".join(f"{json.dumps(row)}\n" for row in table) for name, table in rows.items()}
    files |= {"package/module.py": MODEL, "tokenizer.json": byte_tokenizer().to_str()}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    # older than the runs: `latest` is one of those
    write_sweep(folder / "multirun/DATE/TIME", {(heads,): {0: 3.0} for heads in (1, 2, 4, 8)}, baseline=(2,))
    for name, extra in ((RUN, ()), ("RUN_WITHOUT_MASK", ("experiment=control_no_mask",))):
        settings = (*SMALL, "data.path=text.txt", "trainer.max_steps=4", f"hydra.run.dir={name}", *extra)
        done = run("train", *merged(BARE, *settings), cwd=folder)
        assert done.returncode == 0, done.stderr
    for name in COPIES:
        shutil.copytree(folder / RUN, folder / name)
    folder_of("SmolLM", folder / "FOLDER")
    characters = "\n !" + "".join(chr(i) for i in range(97, 123))
    write_checkpoint(folder / "out-shakespeare-char/ckpt.pt", reference(len(characters)))
    write_meta(folder / "out-shakespeare-char/meta.pkl", characters)
    write_checkpoint(folder / "out/ckpt.pt", reference(264))
    (folder / "nanoGPT").mkdir()
    return folder


def accept(*_, **__):
    raise Accepted


def check(command: Command, folder, monkeypatch):
    """Starts a command that ends where it would compute something; returns what ends without `Accepted`."""
    monkeypatch.setattr("hydra._internal.hydra.Hydra.get_mode", lambda *_, **__: None)  # it composes everything twice
    for name in ACCEPTED[command.script]:
        monkeypatch.setattr(f"tril.{name}", accept)
    main = importlib.import_module("tril.train" if command.script == "train" else f"tril.scripts.{command.script}").main
    arguments = [STANDS_FOR.get(word, word) for word in command.words[2:]]
    return call(main, *arguments, cwd=folder, TRIL_CACHE=str(folder / "cache"), HF_HUB_OFFLINE="1")


def slow_unless_of_readme(value, name: str):
    return pytest.param(value, id=ascii(name)[1:-1][:90], marks=[pytest.mark.slow] * (not name.startswith("README.md")))


STARTED = [command for command in OF_TRIL if not CANNOT_START & {*command.words}]
WITH_EXAMPLES = [page for page in PAGES if page.name not in (COMPUTED, EDITED) and blocks(page, ("python",))]


@pytest.mark.parametrize("command", [slow_unless_of_readme(each, f"{each.page}: {each.text}") for each in STARTED])
def test_a_documented_command_is_accepted(command, folder, monkeypatch):
    if any(word.startswith("--help") for word in command.words):
        assert check(command, folder, monkeypatch).returncode == 0
        return
    with pytest.raises(Accepted):
        done = check(command, folder, monkeypatch)
        pytest.fail(f"{command.page}: {command.text}\n{done.stdout}{done.stderr}")


def test_a_wrong_command_is_found(folder, monkeypatch):
    for text in ("python train.py model.n_head=2", "tril train model=nan", "python scripts/sample.py ckpt=nowhere"):
        assert check(Command("README.md", text, tuple(text.split())), folder, monkeypatch).returncode == 2


def test_no_shell_expands_a_command_and_other_programs_get_what_exists():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = settings["project"]
    markers = [marker.partition(":")[0] for marker in settings["tool"]["pytest"]["ini_options"]["markers"]]
    [hook] = blocks(ROOT / "docs/certify_your_model.md", ("yaml",))  # of pre-commit
    assert re.findall(r"entry: (.*)", hook)[0] in [command.text for command in OF_TRIL]
    for command in COMMANDS:
        program, *words = command.words
        if command.script:
            assert not GLOB.search(QUOTED.sub("", command.text)), f"{command.page}: quote the value in {command.text}"
            continue
        assert program in OTHER_PROGRAMS, f"{command.page}: {command.text} is not tested"
        if program == "pip":
            assert set(re.findall(r"\[(\w+)\]", command.text)) <= set(project["optional-dependencies"])
            assert [word for word in words if word.startswith("torch")] <= project["dependencies"]
        if program == "python":
            assert words[0] == "-m" and importlib.util.find_spec(words[1])
        if program == "pytest" and "-m" in words:
            assert words[words.index("-m") + 1] in markers


@pytest.mark.parametrize("page", [slow_unless_of_readme(page, page.name) for page in WITH_EXAMPLES])
def test_the_python_examples_of_a_page_run(page, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("TRIL_CACHE", str(folder / "cache"))
    names = {}
    for example in blocks(page, ("python",)):
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
