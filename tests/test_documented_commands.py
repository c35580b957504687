"""Every command in README.md and docs/*.md is accepted by the code, up to the point where it would compute something.

What needs a GPU, the network or a cluster is marked on the page: `# needs a GPU`. The slow tests run some commands
completely, most of them shortened. The Python examples run as they are, but for the size of models.
"""

import importlib
import importlib.util
import re
import sys
import tomllib

import pytest

from tests.calls import call
from tests.documented import COMPUTED, EDITED, PAGES, ROOT, Command, blocks, commands, unquoted
from tests.documented_files import write_files
from tests.runs import TINY
from tril.model.causality import assert_causal

COMMANDS = [command for command in commands() if command.page != f"docs/{EDITED}"]
OF_TRIL = list({command.words: command for command in COMMANDS if command.script}.values())
OTHERS = [command for command in COMMANDS if not command.script]
GRIDS = ("scripts.experiments.grid.estimate_runs", "scripts.experiments.grid.name_runs")  # the second one on clusters
ACCEPTED = {  # what each script calls when it has accepted its settings
    "train": ("data.datamodule.TextDataModule.prepare_data", *GRIDS, "scripts.cli.plan.print_plan"),
    "certify": ("model.causality.certificate.certify_model",),
    "evaluate": (
        *("scripts.evaluate.measure_text", "model.evaluation.token_costs.token_costs"),
        *("model.evaluation.pairs.score_pairs", "model.evaluation.task_model.run_tasks"),
    ),
    "export": ("model.interop.hf_export.export_hf", "model.interop.gguf_file.write_gguf"),
    "heads": ("scripts.heads.log", "scripts.experiments.head_averages.describe_sweep"),
    "play": ("scripts.playground.server.create_server",),
    "referee": ("scripts.referee.train_pairs",),
    "report": ("scripts.experiments.losses.losses_of",),
    "sample": ("scripts.sample.sample",),
}
STANDS_FOR = {  # words of commands: what they are here
    "hf=my-model": "hf=FOLDER",
    "hf=ORG/NAME": "hf=FOLDER",
    "hydra.run.dir=outputs/0": "hydra.run.dir=new",  # the folder has the runs that the pages train first
    "hydra.run.dir=outputs/1": "hydra.run.dir=new",
    "hydra.run.dir=base": "hydra.run.dir=new",
}
CANNOT_START = {  # words of commands that are refused here: what they need
    "init_from=hf:HuggingFaceTB/SmolLM2-135M": "network",
    "torchrun": "cluster",
}
TINY_RUN = (
    *("trainer.max_steps=2", "trainer.val_check_interval=2", "trainer.accelerator=cpu", "trainer.precision=32-true"),
    *("optim.schedule.warmup_steps=1", "callbacks.causality=null", "callbacks.samples=null", "data.batch_size=2"),
)
TINY_MODEL = ("model.context_length=32", "model.n_layers=2", "model.dim=32", "model.n_heads=2")
BPE = ("data.tokenizer.vocab_size=300",)
LITTLE = ("data.token_budget=20000", "data.val_token_budget=5000")
COMPLETE = {  # commands that the slow tests run, with what shortens them; other scripts have slow tests of their own
    "python train.py": (*TINY_MODEL, *LITTLE, *BPE),
    "python train.py model.window=64 model.pos=alibi model.n_kv_heads=1": (
        *TINY_MODEL,
        *LITTLE,
        *BPE,
        "model.window=9",
    ),
    "python train.py data=prose": (*TINY_MODEL, *LITTLE, *BPE),
    "python train.py data.path='notes/**/*.md'": (*TINY_MODEL, *BPE),
    "python train.py 'data.path=[a.txt,posts]'": (*TINY_MODEL, *BPE),
    "python train.py data.path=posts.jsonl data.text_field=body": (*TINY_MODEL, *BPE),
    "python train.py data=shakespeare data.path=input.txt": TINY_MODEL,
    "python train.py data.tokenizer.kind=byte": (*TINY_MODEL, *LITTLE),
    "python train.py experiment=finetune init_from=RUN data.path=my.txt": (),
    "python train.py experiment=finetune init_from=RUN data=files data.format=chat data.path=chat.jsonl": (),
    "python train.py init_from=hf:FOLDER data=files data.path=text.txt": (),
    "python train.py init_from=nanogpt:out-shakespeare-char/ckpt.pt data=shakespeare": ("data.path=input.txt",),
    'python scripts/sample.py ckpt=latest prompt="def " seed=0': (),
    'python scripts/sample.py ckpt=latest prompt="class " temperature=0.7 top_p=0.9 n=3': (),
    "python scripts/sample.py ckpt=latest prompt=\"def \" remove_heads='[L0H1,L2H3]'": (),
    r'python scripts/sample.py ckpt=latest prompt="User: What is 3 plus 4?\n\nAssistant:"': (),
    "python scripts/evaluate.py ckpt=latest": (),
    "python scripts/evaluate.py ckpt=latest data=files data.path=text.txt part=all": (),
    "python scripts/evaluate.py ckpt=latest other=RUN": (),
    "python scripts/evaluate.py ckpt=latest pairs=FILE.jsonl": (),
    'python scripts/evaluate.py ckpt=latest text="def main():"': (),
    "python scripts/report.py dir=latest": (),
    "python scripts/export.py ckpt=latest to=hf out=my-model": (),
    "python scripts/export.py ckpt=latest to=gguf out=model.gguf": (),
    "python scripts/certify.py call=package.module:function vocab_size=65 context_length=64": ("context_length=9",),
}
SLOW = ("+ablation=scaling",)  # words of grids with many runs
pytestmark = pytest.mark.xdist_group("documented")  # one process writes the files
OTHER_PROGRAMS = ("pip", "pytest", "git", "(cd", "cat", "python")
GLOB = re.compile(r"[][*?{}~^]")  # zsh refuses an unquoted pattern that matches no file
EXAMPLES = {page.name: blocks(page, ("python",)) for page in PAGES if page.name not in (COMPUTED, EDITED)}
TINY_MODELS = {'"model=nano", "trainer.max_steps=100"': ", ".join(map(repr, (*TINY, "data.path=text.txt")))}


class Accepted(BaseException):
    """Raised in place of the computation; no handler of the scripts catches it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documented")
    write_files(folder)
    return folder


def name_of(command: Command) -> str:
    return ascii(f"{command.page.removeprefix('docs/')}: {command.text}")[1:-1][:90]


def accept(*_, **__):
    raise Accepted


def check(command: Command, folder, monkeypatch):
    """Starts a command that ends where it would compute something; returns what ends without `Accepted`."""
    monkeypatch.setattr("hydra._internal.hydra.Hydra.get_mode", lambda *_, **__: None)  # it composes everything twice
    for name in ACCEPTED[command.script]:
        monkeypatch.setattr(f"tril.{name}", accept)
    return start(command, folder)


def start(command: Command, folder, *shortened: str):
    """Calls the script's main with the arguments of the command."""
    module = importlib.import_module("tril.train" if command.script == "train" else f"tril.scripts.{command.script}")
    arguments = [STANDS_FOR.get(argument, argument) for argument in command.arguments]
    return call(module.main, *arguments, *shortened, cwd=folder, TRIL_CACHE=str(folder / "cache"), HF_HUB_OFFLINE="1")


def cases():
    for command in OF_TRIL:
        if not set(CANNOT_START) & set(command.words):
            marks = [pytest.mark.slow] if set(SLOW) & set(command.words) else []
            yield pytest.param(command, marks=marks, id=name_of(command))


@pytest.mark.parametrize("command", cases())
def test_a_documented_command_is_accepted(command, folder, monkeypatch):
    if "--help" in command.words:
        assert check(command, folder, monkeypatch).returncode == 0
        return
    with pytest.raises(Accepted):
        done = check(command, folder, monkeypatch)
        pytest.fail(f"{command.page}: {command.text}\n{done.stdout}{done.stderr}")


def test_what_cannot_start_here_is_marked_on_the_page():
    for word, needs in CANNOT_START.items():
        named = [command for command in COMMANDS if word in command.words]
        assert named, f"no page has {word}"
        for command in named:
            assert command.needs == needs, f"{command.page}: write `# needs ...` next to {command.text}"


@pytest.mark.parametrize(
    "text", ["python train.py model.n_head=2", "tril train model=nan", "python scripts/sample.py ckpt=nowhere"]
)
def test_a_wrong_command_is_found(text, folder, monkeypatch):
    command = Command("README.md", text, "", tuple(text.split()))
    assert check(command, folder, monkeypatch).returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize("text", COMPLETE)
def test_a_documented_command_runs(text, folder):
    """Runs of train.py have folders outside of outputs/, so that the newest run stays the same."""
    command = next(command for command in OF_TRIL if command.text == text)
    train = (*TINY_RUN, f"hydra.run.dir=trained/{list(COMPLETE).index(text)}") if command.script == "train" else ()
    done = start(command, folder, *train, *COMPLETE[text])
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_no_shell_expands_a_documented_command():
    for command in filter(lambda command: command.script, COMMANDS):
        assert not GLOB.search(unquoted(command.text)), f"{command.page}: quote the value in {command.text}"


@pytest.mark.parametrize("command", OTHERS, ids=name_of)
def test_other_programs_get_what_exists(command):
    program, *words = command.words
    assert program in OTHER_PROGRAMS, f"{command.page}: {command.text} is not tested"
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = settings["project"]
    if program == "pip":
        extras = re.findall(r"\[(\w+)\]", command.text)
        assert set(extras) <= set(project["optional-dependencies"])
        assert [word for word in words if word.startswith("torch")] <= project["dependencies"]
    if program == "python":
        assert words[0] == "-m" and importlib.util.find_spec(words[1])
    if program == "pytest" and "-m" in words:
        markers = [marker.partition(":")[0] for marker in settings["tool"]["pytest"]["ini_options"]["markers"]]
        assert words[words.index("-m") + 1] in markers


def test_the_hook_of_pre_commit_is_a_documented_command():
    [hook] = blocks(ROOT / "docs/certify_your_model.md", ("yaml",))
    [entry] = re.findall(r"entry: (.*)", hook)
    assert entry in [command.text for command in OF_TRIL]


@pytest.mark.parametrize("page", [name for name, examples in EXAMPLES.items() if examples])
def test_the_python_examples_of_a_page_run(page, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("TRIL_CACHE", str(folder / "cache"))
    names = {}
    for example in EXAMPLES[page]:
        for written, here in TINY_MODELS.items():
            example = example.replace(written, here)
        exec(compile(example, page, "exec"), names)
    for name, test in names.items():
        if name.startswith("test_"):
            test(assert_causal)  # the fixture, tests/test_pytest_plugin.py
    sys.modules.pop("model", None)  # of certify_your_model.md
