"""A wrong command line and a damaged or foreign checkpoint end with status 2 and one line, and leave nothing behind.

A checkpoint from somebody else is data: opening it sends nothing, and writes nothing outside of its run's folder.
"""

import functools
import operator
import runpy
import shlex
import shutil
import socket
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from tests.contract.harness import COMMANDS, ROOT, run, summary, unchanged

FILES = {"text.txt": b"some text\n" * 200, "short.txt": b"hi", "latin1.txt": "é\n".encode("latin1") * 200}
STEPS = ("trainer.max_steps=10", "~callbacks.causality")  # two more than those of `trained`


def edit(path: Path, **settings: object) -> None:
    """Changes settings in a checkpoint; without any, removes all."""
    content = torch.load(path, weights_only=True)
    content["tril"]["settings"] = content["tril"]["settings"] | settings if settings else {}
    torch.save(content, path)


@pytest.fixture(scope="module")
def names(once, run_of):
    """What the names in braces stand for."""
    source, gpt2 = run_of("data.tokenizer.kind=char"), run_of("model=gpt2")

    def write(folder: Path) -> None:
        (folder / "folder").mkdir()
        run("export", f"ckpt={gpt2}", "out=hf", cwd=folder).succeeded()
        shutil.copytree(folder / "hf", folder / "pickle")
        (folder / "pickle" / "model.safetensors").rename(folder / "pickle" / "pytorch_model.bin")
        for name, content in FILES.items():
            (folder / name).write_bytes(content)
        torch.save([1, 2], folder / "list.ckpt")
        shutil.copyfile(source / "checkpoints" / "last.ckpt", folder / "nothing.ckpt")
        edit(folder / "nothing.ckpt")

    folders = {"files": once("wrong", write), "run": source, "gpt2": gpt2}
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield folders | {"port": server.getsockname()[1]}


# The command, the setting that the one line on stderr must name, and its limit or remedy. Names in braces are those of
# `names`. The script of each command is run with its first row.
REFUSED = [
    ("train ++a.b=c", "++a.b=c", "--help=all"),
    ("train model.head_dim=7", "model.head_dim", "rope"),
    ("train compile=reduce-overhead trainer.accumulate_grad_batches=2", "reduce-overhead", "accumulate_grad_batches=1"),
    ("train optim=[]", "optim=[]", "adamw"),
    ("train hydra=1", "hydra=1", "a single run"),
    ("train minutes=0", "minutes=0", "0"),
    ("play ckpt={run} port=70000", "port=70000", "65535"),
    ("certify context_length=3", "context_length", "call"),
    ("referee candidate=-m", "-m", ""),
    ("referee candidate= common=trainer.max_steps=x", "trainer.max_steps", "integer"),
    ("train model.n_heads=5", "model.n_heads=5", "model.dim=192"),
    ("train model.dim=10000000", "model.dim=10000000", "GiB"),
    ("train model.mlp=swigul", "model.mlp=swigul", "swiglu"),
    ("train model.n_heads=4 model.n_kv_heads=3", "model.n_kv_heads=3", "model.n_heads=4"),
    ("train model.n_heads=0 model.mlp=none", "model.n_heads=0", "model.mlp=none"),
    ("train model.causal=false", "model.causal=false", "causality.allow_leak"),
    ("train model.dim=${{nothing}}", "nothing", "model.dim"),
    ("train seed=true", "seed=true", "integer"),
    ("train optim.lr=nan", "optim.lr=nan", ""),
    ("train callbacks.samples.max_new_tokens=1000000000000", "callbacks.samples.max_new_tokens", " 1000000000\n"),
    ("train model.logit_softcap=1e-300", "model.logit_softcap=1e-300", "0.001"),
    ("train trainer.max_steps=1e-3", "trainer.max_steps", "integer"),
    ("train trainer.max_time=soon", "trainer.max_time=soon", "DD:HH:MM:SS"),
    ("train trainer.max_time=00:00:00:00", "trainer.max_time=00:00:00:00", "above zero"),
    ("train trainer=ddp trainer.devices=5000", "trainer.devices=5000", ""),
    ("train trainer=ddp trainer.num_nodes=2", "trainer.num_nodes=2", "torchrun"),
    ("train compile=reduce-overhead trainer=ddp", "reduce-overhead", "one process"),
    # names
    ("train foo=1", "foo", "--help=all"),
    ("train trainer.max_step=5", "trainer.max_step", "trainer.max_steps"),
    ("train model.heads=4", "model.heads", "model.n_heads"),
    ("train n_head=4", "n_head", "model.n_heads"),
    ("train --seed 3", "--seed", "seed="),
    ("train --lr 1e-3", "--lr", "write optim.lr="),
    ("train --version", "--version", "write KEY="),
    ("train model.pos=", "model.pos= must be", "rope"),
    ("train learning_rate=1e-3", "learning_rate", "optim.lr"),
    ("train MODEL.DIM=3", "MODEL.DIM", "model.dim"),
    ("train m\u043edel.dim=3", r"'m\u043edel.dim=3'", ""),  # a letter of another alphabet
    ("train model.dim:3", "'model.dim:3'; settings are written key=value", "experiment=NAME\n"),
    ("train 'model.dim =3'", "'model.dim =3'", "without spaces"),
    ("train notes.txt", "notes.txt", "data.path=notes.txt"),
    ("train model.dim", "model.dim", "key=value"),
    ("train =3", "=3", "key=value"),
    ("train +=3", "+=3", "key=value"),
    ("train model.dim=[", "model.dim=[", ""),
    ("train optim=adam", "optim=adam", "adamw"),
    ("train optim=null", "optim=null", "adamw"),
    ("train model.dim=" + "9" * 5000, "model.dim", ""),
    ("train model.dim=" + "x" * 5000, "model.dim='xxx", "x ... x"),
    ("train logger=[wandb,tensorbord]", "logger=tensorbord", "tensorboard"),
    ("train logger.wandb.project=x", "logger.wandb.project", "logger=wandb"),
    ("train data.repo=a/b", "data.repo", "data"),
    ("train data.source=nowhere", "data.source=nowhere", "stdlib"),
    ("train data=hub", "data.repo", ""),
    ("train +model=small", "model", ""),
    ("train +a=b", "+a=b", "--help=all"),
    ("train ~optim", "optim", "optim=VALUE"),
    ("train ~callbacks.sample", "callbacks.sample", "callbacks.samples"),
    ("train model=nano model=gpt2", "model=gpt2", "model=nano"),
    ("train optim.schedule=cosine", "optim.schedule='cosine'", "optim.schedule.KEY=VALUE"),
    ("train optim.betas=[0.9]", "optim.betas=[0.9]", ""),
    ("train checkpoint=null", "checkpoint=null", "checkpoint.KEY=VALUE"),
    ("train callbacks.progress._target_=os.system", "callbacks.progress._target_", ""),
    ("train +callbacks.mine={{}}", "callbacks.mine", ""),
    ("train +callbacks.mine._target_=lightning.pytorch.callbacks.Nothing", "callbacks.mine", "Nothing"),
    ("train +callbacks.mine._target_=lightning.pytorch.loggers.logger.DummyLogger", "callbacks.mine", "callback"),
    ("train +callbacks.mine._target_=tril.model.training.callbacks.output.Progress", "callbacks.mine", ""),
    # settings without effect
    ("train model.n_heads=1,2", "model.n_heads", "-m"),
    ("train ablation=heads", "ablation=heads", "-m +ablation=heads"),
    ("train +ablation=heads", "model.n_heads", "-m"),
    ("train optim=adamw optim.momentum=0.5", "optim.momentum=0.5", "optim.kind=muon"),
    ("train hydra.verbose=true", "hydra.verbose=true", "a single run"),
    ("train hydra/launcher=joblib", "hydra/launcher=joblib", "a single run"),
    ("train -m 'seed=range(0,0)'", "seed=range(0,0)", "seed=0,1"),
    ("train -m hydra.run.dir=x seed=0,1", "hydra.run.dir=x", "a grid"),
    ("train -m hydra/launcher=nothing seed=0,1", "hydra/launcher=nothing", "joblib"),
    ("train minutes=1 trainer.max_steps=5", "trainer.max_steps=5", "minutes"),
    ("train minutes=1 trainer=ddp", "minutes", "trainer=default"),
    # texts
    ("train data.path=~nosuchuser/a.txt", "~nosuchuser/a.txt", "data.path"),
    ("train data.path={files}/short.txt", "text", ""),
    ("train data.path={files}/text.txt data.val_path={files}/text.txt", "data.val_path", "text.txt"),
    ("train data=files", "data.path", ""),
    ("train data.tokenizer=byte", "data.tokenizer", ""),
    ("train data.batch_size=\"'8'\"", "data.batch_size='8'", "integer"),  # the quotes tell it from 8
    ("train data.double_length_at=[0.7,0.3]", "data.double_length_at=[0.7", ""),
    ("train data.token_budget=512", "data.token_budget=512", "model.context_length=512"),
    ("train data.cache_dir={files}/text.txt", "data.cache_dir", "folder"),
    ("train data.tokenizer.kind=file", "data.tokenizer.path", "tokenizer.json"),
    # runs and models
    ("train hydra.run.dir={files}/text.txt/run", "text.txt", "hydra.run.dir"),
    ("train hydra.run.dir=/proc/run", "/proc/run", "hydra.run.dir"),
    ("train resume={files}/folder", "folder", "last.ckpt"),
    ("train resume={run} model=small", "model=small", "resume"),
    ("train resume={run} trainer.max_steps=4", "trainer.max_steps=4", "at step 8 by"),
    ("train resume={run} hydra.run.dir=more", "hydra.run.dir=more", "resume"),
    ("train resume={run} init_from={run}", "init_from", "resume"),
    ("train experiment=finetune", "init_from", "hf:"),
    ("train init_from=hf:{files}/folder", "folder", "config.json"),
    ("train init_from=hf:{files}/pickle data.path={files}/text.txt", "pickle", "pytorch_model.bin"),
    ("train init_from=nanogpt:{files}/list.ckpt", "list.ckpt", ""),
    ("sample", "outputs/", ""),
    ("sample {run}", "{run}", "ckpt={run}"),
    ("sample ckpt={run} temp=1", "temp", "temperature"),
    ("sample ckpt={run} max_new_tokens=1e30", "max_new_tokens=1000", "1000000000"),
    ("sample ckpt={run} remove_heads=[]", "remove_heads=[] must have at least 1 item, not 0", ""),
    ("sample ckpt={run} n=0", "n=0", "1"),
    ("sample ckpt={run} temperature=1e300", "temperature=1e+300", "1000000"),
    ("sample ckpt={run} device=tpu", "device=tpu", "cpu"),
    ("sample ckpt={run} prompt_file={files}/nowhere.txt", "nowhere.txt", ""),
    ("sample ckpt={run} prompt_file={files}/latin1.txt", "latin1.txt", ""),
    ("sample ckpt={run} prompt_file={files}/text.txt prompt=a", "prompt=a", "prompt_file=null"),
    ("sample ckpt={run} remove_heads=L9H0", "L9H0", "L1H1"),
    ("sample ckpt={run} seed=0,1", "seed=0,1", ""),
    ("sample ckpt={run} stop=''", "stop", "1"),
    ("sample ckpt={run} -m n=2", "-m", ""),
    ("sample ckpt={run} hydra.run.dir=x", "hydra.run.dir=x", ""),
    ("play ckpt={run} port={port}", "{port}", ""),
    ("export ckpt={gpt2}", "out", ""),
    ("export ckpt={gpt2} out={files}", "out", ""),
    ("export ckpt={gpt2} out={files}/text.txt/new", "text.txt", "out=FOLDER"),
    ("evaluate ckpt={run} out=/proc/new", "/proc/new", "out=FOLDER"),
    ("heads ckpt={run} dir={run}", "ckpt", "dir"),
    ("heads dir={files}/text.txt", "text.txt", "folder"),
    ("evaluate ckpt={files}/nothing.ckpt", "nothing.ckpt", ""),
    ("evaluate ckpt={run} tasks=hellaswag", "tasks", ""),
    ("evaluate ckpt={run} data=prose data.batch_size=2", "data.batch_size=2", "evaluate"),
    ("evaluate ckpt={run} data=files data.path={files}/text.txt out={files}/text.txt", "out", "write"),
    ("certify ckpt={run} hf={files}/hf", "ckpt", "hf"),
    ("certify call=os:getcwd vocab_size=9", "context_length", ""),
    ("certify call=os:sep vocab_size=3 context_length=4", "os:sep", "callable"),
    ("certify call=os:sep context_length=4 vocab_size=" + "9" * 30, "vocab_size", str(2**31)),
    ("certify call=not_there:f vocab_size=3 context_length=4", "not_there:f", ""),
    ("certify model=nano budget_seconds=-1", "budget_seconds=-1", "0"),
    ("certify hf={files}/text.txt", "text.txt", ""),
    ("certify", "ckpt=latest", "model=nano"),
    ("certify model.pos=learned model.rope_base=5", "model.rope_base=5", "model.pos=rope"),
    ("report dir={run}", "single run", "dir="),
    ("report dir={files}/folder", "folder", ""),
    ("report margin=1", "multirun/", "folder"),
    ("referee candidate=model.dim=64 budget=tomorrow", "budget=tomorrow", "60m"),
    ("referee candidate=model.n_heads=5", "model.n_heads=5", ""),
    ("referee margin=1", "candidate", "baseline"),
    ("referee model.n_heads=8", "model.n_heads", "a setting of tril train"),
    ("sample ckpt=", "no checkpoint is named", "latest"),
    ("referee candidate=causality.allow_leak=true", "causality.allow_leak", ""),
    ("referee candidate=seed=1", "seed=1", ""),
    ('referee "candidate=\'model.dim="', "quotation", "candidate"),
]


@pytest.mark.parametrize(("words", "setting", "limit"), REFUSED)
def test_it_is_refused_by_name_and_nothing_is_left(words, setting, limit, names, tmp_path):
    command, *words = shlex.split(words.format(**names))
    with unchanged(tmp_path, names["files"], names["run"]):
        done = run(command, *words, cwd=tmp_path)
    done.refused(setting.format(**names), limit.format(**names))


@pytest.mark.parametrize("word", ["ckpt=a\nb\u2028c\x1b[31m", "prompt=\udcff"])  # the last is no UTF-8
def test_an_error_is_one_line_whatever_was_given(word, names, tmp_path):
    done = run("sample", f"ckpt={names['run']}", word, cwd=tmp_path).refused()
    assert len(done.stderr.splitlines()) == 1 and done.stderr[:-1].isprintable() and "codec" not in done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_the_script_of_a_command_refuses_it(name, names, tmp_path, monkeypatch):
    words = next(words for words, *_ in REFUSED if words.split()[0] == name).format(**names)
    script = str(ROOT / ("train.py" if name == "train" else f"scripts/{name}.py"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *shlex.split(words)[1:]])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(script, run_name="__main__")


@pytest.fixture
def copied(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "copy"))


FOREIGN = [  # settings in a checkpoint that could send something, write elsewhere, or load a class
    (("train", "heads", "evaluate"), "data.url", {"data.url": "http://127.0.0.1:{port}"}),
    (("train",), "logger.w", {"logger.w.project": "x", "logger.w.settings.base_url": "http://127.0.0.1:{port}"}),
    (("train",), "logger.csv", {"logger.csv._target_": "lightning.pytorch.loggers.CSVLogger", "logger.csv.name": "x"}),
    (("train",), "callbacks.samples.folder", {"callbacks.samples.folder": "."}),
    (("train",), "callbacks.mine", {"callbacks.mine._target_": "lightning.pytorch.callbacks.LearningRateMonitor"}),
]


@pytest.mark.parametrize(("commands", "setting", "settings"), FOREIGN)
def test_a_saved_setting_that_could_send_or_write_elsewhere_is_not_used(commands, setting, settings, copied, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for path in (copied / "checkpoints").glob("*.ckpt"):
            edit(path, **{key: value.format(port=port) for key, value in settings.items()})
        for command in commands:
            words = [f"resume={copied}", *STEPS] if command == "train" else [f"ckpt={copied}"]
            with unchanged(tmp_path):
                run(command, *words, cwd=tmp_path, WANDB_API_KEY="a" * 40).refused(setting)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_run_goes_on_unless_another_process_trains_it(copied, tmp_path):
    command = ("train", f"resume={copied}", *STEPS)
    with FileLock(copied / ".run.lock"):
        run(*command, cwd=tmp_path).refused("another process", copied)
    run(*command, cwd=tmp_path).succeeded()
    assert summary(copied)["steps"] == 10


LINKED = {  # a command -> a file that it writes in the folder of a run
    "evaluate": "evaluation/evaluation.json",
    "heads windows=2": "heads/heads.png",
    "train": "csv/version_0/metrics.csv",
}


@pytest.mark.parametrize("command", LINKED)
@pytest.mark.parametrize("is_folder", [False, True])
def test_a_command_writes_nothing_through_a_link_in_the_folder_of_a_run(command, is_folder, copied, tmp_path):
    file, (command, *more) = copied / LINKED[command], command.split()
    link, target = (file.parent if is_folder else file), tmp_path / "elsewhere" / "target"
    file.parent.mkdir(exist_ok=True)
    target.parent.mkdir()
    shutil.move(link, target) if link.exists() else target.touch()
    link.symlink_to(target)
    words = [f"resume={copied}", *STEPS] if command == "train" else [f"ckpt={copied}", *more]
    with unchanged(target.parent):
        done = run(command, *words, cwd=tmp_path)
    assert done.returncode == (2 if is_folder or command == "train" else 0), done


def replacing(value: object, *path: object):
    """A function that replaces a value of a checkpoint."""
    return lambda content: functools.reduce(operator.getitem, path[:-1], content).update({path[-1]: value})


STATES = [  # of training, that do not fit the run
    replacing("abc", "optimizer_states"),
    replacing(dict.fromkeys(range(99), {"momentum_buffer": torch.zeros(3)}), "optimizer_states", 0, "state"),
    replacing("abc", "loops"),
    replacing(None, "global_step"),
    replacing(torch.zeros(1, 5, dtype=torch.uint8), "random_states", "cpu"),
    replacing({"Metrics": 3}, "callbacks"),
    replacing({}, "tril", "data"),
]


@pytest.mark.parametrize("change", STATES, ids=range(len(STATES)))
def test_a_state_of_training_that_does_not_fit_the_run_is_one_line(change, copied, tmp_path):
    content = torch.load(path := copied / "checkpoints" / "last.ckpt", weights_only=True)
    change(content)
    torch.save(content, path)
    done = run("train", f"resume={copied}", *STEPS, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("error: "), done
