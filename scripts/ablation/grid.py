"""The cells of a grid: which there are, whether each can be, how large it is and how long it will take."""

import copy
import itertools
import json
import re
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from tril.scripts.common.cli import UserError, explain, plain
from tril.scripts.common.run_config import Plan, check, vocabulary

SETTINGS = (
    "seed",
    "compile",
    "causality",
    "model",
    "data",
    "optim",
    "trainer",
    "callbacks",
)  # all that decides what a run does
VALUE = re.compile(r"(seed|\w+(\.\w+)+)=")  # an override that sets a value, and not the choice of a group
LONGEST_NAME = 120  # characters of a cell's folder


@dataclass
class Cell:
    """One run of the grid.

    reason  why it cannot be; None where it can
    values  of the swept keys
    sizes   its parameters, FLOPs per token and the seconds that it will take, as far as they are known
    """

    overrides: list[str]
    cfg: DictConfig | None = None
    plan: Plan | None = None
    reason: str | None = None
    values: dict[str, object] = field(default_factory=dict)
    folder: str = ""
    sizes: dict[str, float | None] = field(default_factory=dict)

    def entry(self) -> dict:
        """Of sweep.json."""
        own = {"folder": self.folder, "values": self.values, "seed": self.cfg.seed, "overrides": self.overrides}
        return own | {"estimated_seconds": None} | self.sizes


def compose(config: DictConfig, config_name: str, *, elsewhere: bool) -> list[Cell]:
    """Every cell that Hydra will make of the command, with its settings or with the reason why it cannot be.

    elsewhere  the cells run on other machines
    Raises UserError for what is wrong with the command as a whole.
    """
    composer = Composer(config, config_name)
    arguments = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()] + list(
        config.hydra.overrides.task
    )
    try:
        parsed = composer.parser.parse_overrides(arguments)
        [grid] = BasicSweeper.split_arguments(parsed, None)
    except HydraException as error:
        raise UserError(explain(error, config_name)) from error
    cells, seen = [Cell(overrides) for overrides in grid], {}
    for cell in cells:
        try:
            cell.cfg = composer.settings(cell.overrides)
            cell.plan = check(cell.cfg, elsewhere=elsewhere)
        except OmegaConfBaseException as error:  # while a value is read
            cell.reason = explain(error, config_name)
        except (ValueError, OSError) as error:
            cell.reason = " ".join(str(error).split())
        else:
            twin = seen.setdefault(same_run(cell), cell)
            if twin is not cell:
                differing = [its for mine, its in zip(cell.overrides, twin.overrides) if mine != its]
                cell.reason = f"the same run as {' '.join(differing)}: what differs has no effect"
    return cells


class Composer:
    """Settings of cells. Composing, and looking for what was meant by a wrong key, take Hydra tenths of a second: so cells that differ in values
    alone are composed once, and what is wrong with many is looked up once.
    """

    def __init__(self, config: DictConfig, config_name: str):
        self.loader, self.config, self.config_name = GlobalHydra.instance().config_loader(), config, config_name
        self.parser = OverridesParser.create(config_loader=self.loader)
        self.composed: dict[tuple[str, ...], DictConfig] = {}  # by the overrides that are no values
        self.reasons: dict[str, str] = {}  # by Hydra's words

    def settings(self, overrides: list[str]) -> DictConfig:
        """Raises ValueError for overrides that cannot be."""
        values = [text for text in overrides if VALUE.match(text)]
        rest = tuple(text for text in overrides if text not in values)
        try:
            if rest not in self.composed:
                cfg = unplaced(self.loader.load_sweep_config(self.config, list(rest)))
                self.composed[rest] = OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])
            cfg = copy.deepcopy(self.composed[rest])
            for parsed in self.parser.parse_overrides(values):
                OmegaConf.update(cfg, parsed.key_or_group, parsed.value())  # as Hydra does
            return cfg
        except (HydraException, OmegaConfBaseException) as error:
            words = str(error)
            if words not in self.reasons:
                self.reasons[words] = self._reason(overrides, error)
            raise ValueError(self.reasons[words]) from error

    def _reason(self, overrides: list[str], error: Exception) -> str:
        try:
            self.loader.load_sweep_config(self.config, overrides)
        except (HydraException, OmegaConfBaseException) as hydras:  # which says more about a key
            error = hydras
        return explain(error, self.config_name)


def unplaced(cfg: DictConfig) -> DictConfig:
    """Without the folder, which only Hydra's job knows."""
    with read_write(cfg), open_dict(cfg):
        cfg.output_dir = "."
    return cfg


def settings_of(cfg: DictConfig) -> dict:
    """All that decides what a run does, resolved."""
    return {key: plain(cfg[key]) if isinstance(cfg[key], DictConfig) else cfg[key] for key in SETTINGS}


def same_run(cell: Cell) -> str:
    """Equal for two cells whose runs could not but be the same."""
    return json.dumps(settings_of(cell.cfg) | {"model": asdict(cell.plan.model.canonical())}, sort_keys=True)


def legal(cells: list[Cell], *, skip_invalid: bool) -> list[Cell]:
    """Those that can be. Raises UserError that names all others, unless they are to be left out."""
    wrong = [cell for cell in cells if cell.reason is not None]
    if not wrong:
        return cells
    differing = [i for i, texts in enumerate(zip(*(cell.overrides for cell in cells))) if len(set(texts)) > 1]
    seeds: dict[tuple[str, str], list[str]] = {}  # by what else was chosen, and the reason
    for cell in wrong:
        chosen = [cell.overrides[i] for i in differing]
        rest = " ".join(text for text in chosen if not text.startswith("seed="))
        seeds.setdefault((rest, cell.reason), []).extend(
            text[len("seed=") :] for text in chosen if text.startswith("seed=")
        )
    lines = [
        f"  {rest}{f' seed={chr(44).join(its)}' if its else ''}: {reason}" for (rest, reason), its in seeds.items()
    ]
    kept = [cell for cell in cells if cell.reason is None]
    if skip_invalid and kept:
        print("\n".join([f"{len(wrong)} of {len(cells)} cells are left out:", *lines]), flush=True)
        return kept
    remedy = "correct them, or leave them out with sweep.skip_invalid=true" if kept else "correct them"
    raise UserError("\n".join([f"{len(wrong)} of {len(cells)} cells of the grid cannot be; {remedy}", *lines]))


def name(cells: list[Cell]) -> list[str]:
    """Gives each cell its values and the name of its folder; returns the swept keys, among which the seed does not count."""
    texts = [
        {key.lstrip("+"): text for key, _, text in (override.partition("=") for override in cell.overrides)}
        for cell in cells
    ]
    swept = [key for key in texts[0] if key != "seed" and len({text[key] for text in texts}) > 1]
    for cell, text in zip(cells, texts):
        cell.values = {key: value_of(cell.cfg, key, text[key]) for key in swept}
        cell.folder = folder_name({key: text[key] for key in swept} | {"seed": cell.cfg.seed})
    return swept


def value_of(cfg: DictConfig, key: str, choice: str | None) -> object:
    """What the key holds; of a config group the name of its choice."""
    value = OmegaConf.select(cfg, key.partition("@")[0].replace("/", "."))
    if isinstance(value, DictConfig):
        return choice
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, ListConfig) else value


def folder_name(values: dict[str, object]) -> str:
    text = ",".join(f"{key}={value}" for key, value in values.items())
    clean = re.sub(r"[^\w.,=+-]", "_", text)[:LONGEST_NAME]
    return clean if clean == text else f"{clean}-{sha256(text.encode()).hexdigest()[:8]}"


def measure(cells: list[Cell]) -> None:
    """Sizes, and the time that each will take here, on its text; what the text does not allow becomes the reason."""
    import torch

    from tril.data.batches import TrainWindows, ValWindows
    from tril.data.prepare import prepare
    from tril.model.gpt import GPT
    from tril.model.training import run_estimate as estimate

    speeds = {}
    for cell in cells:
        plan, data = cell.plan, cell.plan.data
        try:
            budgets = {"token_budget": data.token_budget, "val_token_budget": data.val_token_budget}
            packed = prepare(data.source, data.tokenizer, data.cache_dir, **budgets)
            TrainWindows(packed.tokens("train"), plan.model.context_length, data.batch_size, cell.cfg.seed)
            val_windows = ValWindows(packed.tokens("val"), plan.model.context_length, data.batch_size).n_windows
            config = replace(plan.model, vocab_size=vocabulary(cell.cfg.model.vocab_size, packed.meta["vocab_size"]))
        except (ValueError, OSError) as error:
            cell.reason = " ".join(str(error).split())
            continue
        with torch.device("meta"):
            cell.sizes = estimate.sizes(GPT(config))
        key = repr((config, plan.optim, data.batch_size, plan.hardware))
        if key not in speeds:
            speeds[key] = estimate.measure(config, plan.optim, data.batch_size, plan.hardware)
        cell.sizes["estimated_seconds"] = speeds[key].run(
            steps=plan.steps,
            windows_per_step=data.batch_size * plan.accumulate,
            val_windows=val_windows,
            validations=-(-plan.steps * plan.accumulate // cell.cfg.trainer.val_check_interval),
        )


def table(cells: list[Cell], states: list[str], clock) -> str:
    """A line for each configuration: its seeds, sizes, seconds of one cell, and how far its cells are."""
    rows = [["", "seeds", "parameters", "MFLOP per token", "a cell takes", "so far"]]
    members = sorted(range(len(cells)), key=lambda i: str(cells[i].values))
    groups = [list(group) for _, group in itertools.groupby(members, key=lambda i: str(cells[i].values))]
    for group in sorted(groups, key=min):  # in the order of the command
        cell, seeds = cells[group[0]], ",".join(str(cells[i].cfg.seed) for i in group)
        label = ", ".join(f"{key}={value}" for key, value in cell.values.items()) or "the configuration"
        count = {state: sum(states[i] == state for i in group) for state in ("finished", "unfinished", "failed")}
        so_far = ", ".join(f"{n} {state}" for state, n in count.items() if n)
        sizes = ["?"] * 3  # of a grid for another machine
        if cell.sizes:
            mflops = cell.sizes["flops_per_token"] / 1e6
            sizes = [f"{cell.sizes['parameters']:,}", f"{mflops:,.1f}", clock(cell.sizes["estimated_seconds"])]
        rows.append([label, seeds, *sizes, so_far])
    widths = [max(map(len, column)) for column in zip(*rows)]
    aligned = [
        [line[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(line[1:5], widths[1:5])), line[5]]
        for line in rows
    ]
    return "\n".join("  ".join(line).rstrip() for line in aligned)
