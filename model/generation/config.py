"""The settings of sampling, without torch, so that a command can check them before it loads anything."""

from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from tril.data.settings import setting, strict_settings

# These two are settings of every command that reads a model.
CKPT = setting("latest", "a checkpoint file, a run folder, or latest: the newest run below outputs/ and multirun/")
DEVICE = setting("auto", "auto | cpu | cuda | mps")
Text = Annotated[str, Field(min_length=1)]
AS_TUPLE = BeforeValidator(lambda x: (x,) if isinstance(x, str) else tuple(x) if isinstance(x, list) else x)


@dataclass(frozen=True, config=strict_settings())
class SamplingConfig:
    """How many tokens are drawn, and from which distribution.

    top_p is from Holtzman et al. 2020, min_p from Nguyen et al. 2024, the penalty from CTRL (Keskar et al. 2019).

    Raises:
        pydantic.ValidationError: values are out of range; a ValueError that lists every one.
    """

    max_new_tokens: int = setting(256, "of each sample, at most", ge=1, le=10**9)
    temperature: float = setting(0.8, "0: always the most probable token", ge=0, le=1e6)
    top_k: int | None = setting(50, "only the k most probable tokens; null: all", ge=1)
    top_p: float | None = setting(
        None, "only the most probable tokens whose probabilities sum to at least this; null: all", gt=0, le=1
    )
    min_p: float | None = setting(
        None, "only tokens with at least this share of the highest probability; null: all", ge=0, le=1
    )
    repetition_penalty: float | None = setting(
        None,
        "above 1, tokens that the text already contains become less likely; 1: off; null: 1.1, and 1 if a token is a "
        "character or a byte, which every text repeats",
        gt=0,
        allow_inf_nan=False,
    )
    stop: Annotated[tuple[Text, ...] | None, AS_TUPLE] = setting(
        None, r"the sample ends before this text, or the first of a list; \n is a line end; null: none", escapes=True
    )
    seed: int | None = setting(0, "null: a new seed each time", ge=0, lt=2**64)  # the range of torch.Generator


@dataclass(frozen=True, config=strict_settings())
class SampleConfig(SamplingConfig):
    """What `sample` continues, and with which model."""

    ckpt: str = CKPT
    prompt: str = setting(
        "",
        r"text to continue; \n is a line end, \\ a backslash; empty: a new text",
        needs="prompt_file=null",
        escapes=True,
    )
    prompt_file: str | None = setting(None, "a file with the prompt, taken as it is; -: standard input; null: prompt")
    n: int = setting(1, "samples per prompt; one is printed while it is generated, several as a batch", ge=1, le=10_000)
    remove_heads: Annotated[tuple[Text, ...], Field(min_length=1), AS_TUPLE] | None = setting(
        None, 'heads to remove: "[L0H1, L2H3]", layer 0 head 1 and layer 2 head 3; null: none'
    )
    compile: bool = setting(False, "compile the step after the prompt: up to a minute, then faster; for long texts")
    device: str = DEVICE
