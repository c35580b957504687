"""Measures a checkpoint on a text:  tril evaluate ckpt=latest [data=files data.path=FILE]

Loss, perplexity, bits per byte and accuracy with their intervals over documents; by default on the validation part of
the run. other=CHECKPOINT compares two checkpoints. Prints a table; writes evaluation.json.
"""

from pathlib import Path

from tril.data.sources import parse
from tril.model.atomic_files import write_json
from tril.model.evaluation.config import EvaluateConfig
from tril.model.runs import find_checkpoint, run_folder
from tril.scripts.cli.app import Composed, command
from tril.scripts.cli.config import refuse_unused
from tril.scripts.cli.errors import check_writable, printed_too, user_errors

OF_TRAINING = tuple(
    f"data.{name}" for name in ("tokenizer", "batch_size", "double_length_at", "val_batch_size", "document_mask")
)


@command("evaluate", EvaluateConfig, {"data": None})
def main(settings: EvaluateConfig, composed: Composed) -> None:
    data = composed.settings.get("data")
    with user_errors():  # before torch, which takes a second to import
        for key in composed.given:
            if key.startswith(OF_TRAINING):
                raise ValueError(f"{key}={composed.given[key]} has no effect on evaluate; leave it out")
        paths = [find_checkpoint(path) for path in (settings.ckpt, settings.other) if path is not None]
        folder = Path(settings.out or run_folder(paths[0]) / "evaluation")
        check_writable(folder, "out")
        source = None if data is None else parse(data)
        if source is not None:
            refuse_unused([("data", source)], composed.given)
    from tril.model.evaluation.evaluate import Subject, evaluate_texts
    from tril.model.training.hardware import use_device

    with user_errors():
        device = use_device(settings.device)
        subjects = [Subject.of(path, device) for path in paths]
        report, text = evaluate_texts(subjects, source, settings.part)
    with printed_too(f"{text}\n{folder}: evaluation.json"):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "evaluation.json", report)


if __name__ == "__main__":
    main()
