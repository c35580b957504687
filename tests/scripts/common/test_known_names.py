"""Names of other projects, and command lines in another order than Hydra's."""

import pytest
from omegaconf import OmegaConf

from tests.calls import call
from tests.conftest import assert_refused
from tril import train
from tril.model.training.trainer_config import TrainerConfig
from tril.scripts import sample
from tril.scripts.common import cli
from tril.scripts.common.arguments import DEBUG, arranged
from tril.scripts.common.known_names import KNOWN, SETTINGS, meant

MEANT = {
    "block_size": "model.context_length",
    "max_position_embeddings": "model.context_length",
    "seq_len": "model.context_length",
    "n_embd": "model.dim",
    "model.hidden_size": "model.dim",
    "d_model": "model.dim",
    "n_layer": "model.n_layers",
    "num_hidden_layers": "model.n_layers",
    "model.n_head": "model.n_heads",
    "num_attention_heads": "model.n_heads",
    "num_key_value_heads": "model.n_kv_heads",
    "intermediate_size": "model.mlp_hidden",
    "dropout": "model.resid_dropout",
    "rope_theta": "model.rope_base",
    "batch_size": "data.batch_size",
    "per_device_train_batch_size": "data.batch_size",
    "dataset": "data",
    "learning_rate": "optim.lr",
    "lr": "optim.lr",
    "weight_decay": "optim.weight_decay",
    "warmup_iters": "optim.schedule.warmup_steps",
    "epochs": "trainer.max_steps",
    "max_iters": "trainer.max_steps",
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
    "grad_clip": "trainer.gradient_clip_val",
    "eval_interval": "trainer.val_check_interval",
    "device": "trainer.accelerator",
    "dtype": "trainer.precision",
    "out_dir": "hydra.run.dir",
    "wandb_project": "logger.wandb.project",
    "logger.project": "logger.wandb.project",
    "resume_from_checkpoint": "resume",
    "model_name_or_path": "init_from",
}


@pytest.fixture(scope="module")
def settings():
    return set(cli._setting_names("train"))


@pytest.mark.parametrize("key", MEANT)
def test_names_of_other_projects_get_the_setting_that_they_mean(key, settings):
    expected = MEANT[key]
    assert meant(key, settings | {"hydra.run.dir"}) == expected


@pytest.mark.parametrize(
    "key", ["block_size", "n_embd", "learning_rate", "epochs", "model.num_heads", "logger.project"]
)
def test_the_message_asks_for_that_setting(key, tmp_path):
    assert_refused(
        call(train.main, f"{key}=3", cwd=tmp_path), f"there is no setting {key}; did you mean {MEANT_BY[key]}?"
    )


MEANT_BY = MEANT | {"model.num_heads": "model.n_heads"}


def test_the_suggestion_is_a_setting_of_the_program_itself(tmp_path):
    assert_refused(call(sample.main, "num_samples=3", cwd=tmp_path), "there is no setting num_samples; did you mean n?")
    assert_refused(call(sample.main, "batch_size=3", cwd=tmp_path), "there is no setting batch_size; see ")


def test_every_suggestion_exists(settings):
    groups = {name for name in cli.CONFIGS.iterdir() if name.is_dir()}
    elsewhere = {"data.path", "hydra.run.dir"}  # of other choices of a group, and of Hydra
    assert set(SETTINGS) - settings - elsewhere - {group.name for group in groups} == set(MEANT_OF_SAMPLE)
    assert sum(len(names.split()) for names in SETTINGS.values()) == len(KNOWN)  # no name twice


MEANT_OF_SAMPLE = ("n", "prompt", "max_new_tokens", "temperature", "top_k", "top_p")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--batch_size=12", "--batch_size=12: settings have no dashes; write data.batch_size=12"),
        ("--n_embd", "--n_embd: settings have no dashes; write model.dim=VALUE"),
        ("--learning-rate=1e-3", "--learning-rate=1e-3: settings have no dashes; write optim.lr=1e-3"),
        ("--zzz=1", "--zzz=1: settings have no dashes; write zzz=1"),
    ],
)
def test_flags_are_settings_without_dashes(argument, message, tmp_path):
    assert_refused(call(train.main, argument, cwd=tmp_path), message)


def test_several_values_need_a_grid(tmp_path):
    remedy = "add -m for a grid of runs, or write a list as model.n_heads=[1,2]"
    assert_refused(
        call(train.main, "model.n_heads=1,2", cwd=tmp_path), f"model.n_heads=1,2 has several values; {remedy}"
    )
    assert_refused(call(sample.main, "n=1,2", cwd=tmp_path), "n=1,2 has several values; give one")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("data=shakespeare -m model.n_heads=1,2", "-m data=shakespeare model.n_heads=1,2"),
        ("seed=0,1 --multirun", "--multirun seed=0,1"),
        ("-m seed=0 -m", "-m seed=0"),
        ("data.path=a.txt", "data=files data.path=a.txt"),
        ("seed=1 data.path=a.txt -m", "-m data=files seed=1 data.path=a.txt"),
        ("data=shakespeare data.path=a.txt", "data=shakespeare data.path=a.txt"),
        ("experiment=shakespeare data.path=a.txt", "experiment=shakespeare data.path=a.txt"),
        ("experiment=finetune data.path=a.txt", "data=files experiment=finetune data.path=a.txt"),
        ("resume=latest data.path=a.txt", "resume=latest data.path=a.txt"),
        ("--help", "--help"),
        ("debug=false", "debug=false"),
        ("-m debug=true trainer.max_steps=7", f"-m {' '.join(DEBUG)} trainer.max_steps=7"),
    ],
)
def test_flags_come_first_and_a_path_means_files(typed, expected):
    assert arranged(typed.split(), "train", ["shakespeare"]) == expected.split()


def test_a_path_means_files_only_where_text_is_read():
    assert arranged(["data.path=a.txt"], "sample") == ["data.path=a.txt"]


def test_a_grid_may_end_with_its_flag(tmp_path):
    done = call(train.main, "model.n_heads=1,5", "model.dim=7", "-m", cwd=tmp_path)
    assert done.returncode == 2 and "model.n_heads=5" in done.stderr and "unrecognized" not in done.stderr


def test_completion_lists_groups_and_keys(tmp_path, monkeypatch):
    for line, expected in (("model=", "model=base model=gpt2"), ("model.n_h", "model.n_heads=")):
        monkeypatch.setenv("COMP_LINE", f"python train.py {line}")
        done = call(train.main, "-sc", "query=bash", cwd=tmp_path)
        assert done.returncode == 0 and done.stdout.startswith(expected), done.stderr


def trainer_of(**changes):
    needed = OmegaConf.load(cli.CONFIGS / "trainer" / "default.yaml")
    return TrainerConfig(**{key: value for key, value in {**needed, **changes}.items() if key in FIELDS})


FIELDS = TrainerConfig.__dataclass_fields__


@pytest.mark.parametrize(
    ("typed", "precision"),
    [("bf16", "bf16-mixed"), (16, "16-mixed"), ("16", "16-mixed"), (32, "32-true"), ("fp32", "32-true")],
)
def test_short_names_of_precisions(typed, precision):
    assert trainer_of(precision=typed).precision == precision


@pytest.mark.parametrize(("mps", "kind"), [(True, "mps"), (False, "cuda")])
def test_gpu_is_the_kind_that_the_machine_has(mps, kind, monkeypatch):
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: mps)
    assert trainer_of(accelerator="gpu").accelerator == kind
