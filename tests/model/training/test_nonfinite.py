"""A step that is not finite changes nothing: it stops the run with its cause, or it is skipped."""

import functools
import math

import pytest
import torch
from lightning import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch._dynamo.utils import counters
from torch.optim.lr_scheduler import LambdaLR

from tests.model.training.tiny_fits import (
    OPTIM,
    STEPS,
    Before,
    batches,
    damaged_losses,
    fit,
    new_model,
    new_module,
    weights,
)
from tril.model.training.callbacks.gradient_norms import GradientNorms
from tril.model.training.callbacks.metrics import Metrics
from tril.model.training.errors import NonFiniteError
from tril.model.training.optim import build_optimizer
from tril.model.training.schedule import lr_factor

MODULES = ["embed", "blocks.0.norm1", "blocks.0.attn.q_proj", "blocks.1.attn.o_proj", "blocks.1.mlp.up", "head"]


def set_nan(name):
    def change(module):
        module.model.get_parameter(f"{name}.weight").data.fill_(math.nan)

    return change


@pytest.mark.parametrize("name", MODULES)
def test_the_first_module_with_a_non_finite_output_is_named(name):
    model = new_model(norm="layernorm")  # its norms have weights
    with pytest.raises(NonFiniteError) as stopped:
        fit(new_module(model), Before(4, set_nan(name)), GradientNorms())
    assert stopped.value.step == 3, "steps that were made"
    assert str(stopped.value).startswith("step 4 is not finite: loss ")  # finite for NaN queries: SDPA ignores them
    assert f", gradient norm nan, batch 3 in epoch 0, first non-finite output {name}, learning rates muon " in str(
        stopped.value
    )
    assert "\n" not in str(stopped.value)


@pytest.mark.parametrize("mode", ["default", "regional"])
def test_the_module_of_a_compiled_model_is_named_without_another_compilation(mode, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(without_code, torch.compile))
    compiled = []

    def change(module):
        compiled.append(counters["stats"]["unique_graphs"])
        set_nan("blocks.1.mlp.up")(module)

    torch._dynamo.reset()
    with pytest.raises(NonFiniteError, match="first non-finite output blocks.1.mlp.up,"):
        fit(new_module(new_model(), compile=mode), Before(3, change), GradientNorms())
    assert counters["stats"]["unique_graphs"] == compiled[0] > 0


def without_code(compile, function, *, mode=None, **options):
    return compile(function, backend="aot_eager", **options)


def test_the_update_is_not_made():
    seen = {}

    class Remember(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.update(weights=weights(module), state=states(trainer.optimizers[0]))

    module = damaged_losses(new_module(new_model()), {5: math.nan})
    optimizers = []
    configure = module.configure_optimizers
    module.configure_optimizers = lambda: optimizers.append(configure()) or optimizers[0]
    with pytest.raises(NonFiniteError, match="step 6 is not finite") as stopped:
        fit(module, Remember(), GradientNorms())
    assert_equal(weights(module), seen["weights"])
    assert_equal(states(optimizers[0]["optimizer"]), seen["state"])
    rate = lr_factor(5, STEPS, OPTIM.schedule)
    rates = f"learning rates muon {0.014 * rate:.4g}, decay {0.02 * rate:.4g}, no_decay {0.02 * rate:.4g}; "
    assert rates + "the weights stay those of step 5; lower optim.lr_scale" in str(stopped.value)


def states(optimizer) -> dict[str, torch.Tensor]:
    state = optimizer.state_dict()["state"]
    return {f"{i}/{key}": value.clone() for i, entry in state.items() for key, value in entry.items()}


def assert_equal(actual: dict, expected: dict):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def test_a_gradient_alone_is_named_in_the_order_of_the_backward_pass():
    """The gradient of the output of block 0 becomes NaN, so those of block 0 and of the embedding are."""

    def damage(module):
        def hook(block, inputs, output):
            output.register_hook(lambda gradient: gradient * math.nan) if output.requires_grad else None

        module.model.blocks[0].register_forward_hook(hook)

    with pytest.raises(NonFiniteError) as stopped:
        fit(new_module(new_model()), Before(3, damage), GradientNorms())
    assert "all outputs finite, first non-finite gradient blocks.0.mlp.down.weight" in str(stopped.value)


def test_an_infinite_loss_with_finite_gradients_stops_too():
    module = new_module(new_model())
    step = module.training_step
    module.training_step = lambda batch, batch_idx: step(batch, batch_idx) + (math.inf if batch_idx == 2 else 0)
    with pytest.raises(NonFiniteError, match=r"step 3 is not finite: loss inf, gradient norm \d"):
        fit(module, GradientNorms())


def test_the_micro_batch_is_named():
    """The embedding of a token that one micro-batch alone has becomes NaN."""
    ids = [inputs for inputs, _ in batches(3 * STEPS)]
    here = set(ids[7].flatten().tolist()) - set(torch.stack([ids[6], ids[8]]).flatten().tolist())

    def change(module):
        module.model.embed.weight.data[list(here)] = math.nan

    with pytest.raises(NonFiniteError, match="step 3 is not finite.*, batch 7 in epoch 0, first .* embed,"):
        fit(
            new_module(new_model()),
            Before(3, change),
            GradientNorms(),
            accumulate_grad_batches=3,
            val_check_interval=24,
        )


def reference(skipped: set[int], accumulate: int) -> tuple[dict, dict]:
    """Weights and optimizer state of a loop that leaves out the updates of some steps, counted from 1."""
    model, data = new_model(), batches(STEPS * accumulate)
    optimizer = build_optimizer(model, OPTIM)
    schedule = LambdaLR(optimizer, lambda step: lr_factor(step, STEPS, OPTIM.schedule))
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        for inputs, targets in data[(step - 1) * accumulate : step * accumulate]:
            loss = model.nll(inputs, targets).sum() / targets.numel()
            (loss / accumulate).backward()
        if step not in skipped:
            optimizer.step()
        schedule.step()
    return {name: value.clone() for name, value in model.state_dict().items()}, states(optimizer)


@pytest.mark.parametrize(("accumulate", "bad", "skipped"), [(1, [2], [3]), (2, [5, 12], [3, 7])])
def test_skipped_steps_leave_weights_and_optimizer_as_they_are_to_the_bit(accumulate, bad, skipped, capsys):
    module, callback = new_module(new_model()), GradientNorms("skip", max_skips=1)
    damaged_losses(module, dict.fromkeys(bad, math.nan))
    trainer = fit(module, callback, accumulate_grad_batches=accumulate)
    expected, state = reference(set(skipped), accumulate)
    assert_equal(weights(module), expected)
    assert_equal(states(trainer.optimizers[0]), state)
    assert callback.skipped == skipped and trainer.global_step == STEPS
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" is not")[0] for line in lines] == [f"skipped: step {step}" for step in skipped]


def test_the_logged_loss_leaves_out_skipped_steps():
    """The module's own loss of the bad step is NaN, as it is where a forward pass fails."""
    module, callback = new_module(new_model()), GradientNorms("skip")
    losses, compute = [], module.losses

    def damaged(batch):
        if not torch.is_grad_enabled():  # the search for the first module
            return compute(batch)
        losses.append(compute(batch) * (math.nan if len(losses) == 2 else 1))
        return losses[-1]

    module.losses = damaged
    trainer = fit(module, callback, limit_val_batches=0)
    means = [each.detach().double().mean().item() for each in losses if each.isfinite().all()]
    expected = [sum(means[:2]) / 2, means[2], sum(means[3:5]) / 2, sum(means[5:7]) / 2]
    assert [row["loss"] for row in Metrics.of(trainer).train] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("bad", "skipped", "stops"), [([2, 4, 6], [3, 5, 7], None), ([2, 3, 4], [3, 4], 5)])
def test_consecutive_skips_have_a_limit(bad, skipped, stops):
    module, callback = damaged_losses(new_module(new_model()), dict.fromkeys(bad, math.nan)), GradientNorms("skip", 2)
    if stops is None:
        fit(module, callback)
    else:
        with pytest.raises(
            NonFiniteError, match="callbacks.gradients.max_skips=2 steps before it were skipped"
        ) as error:
            fit(module, callback)
        assert error.value.step == stops - 1
    assert callback.skipped == skipped


def test_a_validation_loss_that_is_not_finite_stops_before_its_checkpoint():
    class Damage(Callback):
        def on_validation_start(self, trainer, pl_module):
            set_nan("blocks.0.mlp.up")(pl_module)

    message = (
        "the validation loss at step 8 is nan, first in window 0 of 4; non-finite weights: blocks.0.mlp.up.weight;"
    )
    with pytest.raises(NonFiniteError, match=message) as stopped:
        fit(new_module(new_model()), Damage(), GradientNorms("skip"))
    assert stopped.value.step == 8


def test_overflow_of_scaled_gradients_is_left_to_the_scaler():
    """A loss scale far above the range of float16: its first gradients are infinite, and the scaler lowers it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    callback = GradientNorms()
    fit(new_module(new_model()), callback, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert scaler.get_scale() < 2.0**24, "gradients were infinite"
    assert callback.skipped == [] and all(math.isfinite(row["total"]) for row in callback.rows)
    assert callback.detector.state_dict()["window"] == pytest.approx([math.log(31)] * STEPS, rel=0.2), "not scaled"
