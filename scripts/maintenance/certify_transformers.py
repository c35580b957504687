"""Certifies a tiny model of every causal language model class of `transformers`, and prints a table.

    python -m tril.scripts.maintenance.certify_transformers [Llama GPT2 ...]

Each class has a process of its own, which a hang or a crash ends alone.
"""

import argparse
import json
import multiprocessing
import queue
import time
from typing import Any

TIMEOUT = 300.0  # seconds of a class
BUDGET = 3.0  # seconds of its optional checks


def judge(name: str) -> dict[str, Any]:
    """Builds and certifies the class with this name; plain values."""
    import transformers

    from tril.model.causality.certificate import certify_model
    from tril.model.causality.hf import build, hf_model, quiet
    from tril.model.causality.model import one_line
    from tril.model.causality.variants import module_variants
    from tril.scripts.maintenance.tiny_configs import tiny_config

    quiet()
    try:
        model_class = getattr(transformers, name)
        model = hf_model(name, build(tiny_config(model_class), 0, model_class=model_class))
    except Exception as error:  # code of other projects may raise anything
        return {"class": name, "verdict": "not built", "why": one_line(error)}
    try:
        certificate = certify_model(model, module_variants(model), BUDGET)
    except Exception as error:
        return {"class": name, "verdict": "error", "why": one_line(error)}
    verdict = "causal" if certificate.passed else ", ".join(dict.fromkeys(r.check for r in certificate.failures))
    why = certificate.failures[0].where if certificate.failures else "; ".join(certificate.undecided)
    return {"class": name, "verdict": verdict, "why": why, "uses": certificate.uses, "notes": certificate.notes}


def send_verdict(name: str, results: Any) -> None:
    results.put(judge(name))


def in_process(name: str) -> dict[str, Any]:
    """The verdict on a class, computed in another process."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=send_verdict, args=(name, results), daemon=True)
    process.start()
    started = time.monotonic()
    try:
        while True:
            try:
                return results.get(timeout=1.0)
            except queue.Empty:
                if not process.is_alive():
                    return {"class": name, "verdict": "error", "why": f"ended with status {process.exitcode}"}
                if time.monotonic() - started > TIMEOUT:
                    return {"class": name, "verdict": "error", "why": f"took more than {TIMEOUT:.0f} s"}
    finally:
        process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of classes; none: all")
    parser.add_argument("--out", help="a file of JSON lines")
    arguments = parser.parse_args()
    from tril.scripts.maintenance.tiny_configs import causal_classes

    classes = [c for c in causal_classes() if not arguments.names or any(n in c for n in arguments.names)]
    for name in classes:
        verdict = in_process(name)
        print(f"| {verdict['class']} | {verdict['verdict']} | {verdict['why']} |", flush=True)
        if arguments.out:
            with open(arguments.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(verdict) + "\n")


if __name__ == "__main__":
    main()
