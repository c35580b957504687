"""docs/tour.ipynb: its stored outputs, and the same figures when it is executed from the start."""

import json
import math
import re
from pathlib import Path

import nbformat
import pytest

TOUR = Path(__file__).resolve().parents[1] / "docs" / "tour.ipynb"
BOUND = 6 / 14 * math.log(8) * (1 + 6 / 57)  # the lowest loss of copies in windows of 57 characters


def printed(notebook: nbformat.NotebookNode) -> str:
    """All text output of the cells, none of which may have failed."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def check_figures(notebook: nbformat.NotebookNode) -> None:
    """The figures that the text of the notebook explains."""
    text = printed(notebook)
    loss, lowest = map(
        float, re.search(r"validation loss (\S+) nats per token; the lowest possible is (\S+)", text).groups()
    )
    assert lowest == round(BOUND, 3) and BOUND <= loss < BOUND + 0.15
    assert "gfbcae|gfbcae" in text
    weights = [float(weight) for weight in re.findall(r"^L0H\d: (\S+)$", text, re.MULTILINE)]
    whole, *without = [
        int(share) / 100 for share in re.findall(r"^(?:whole model: |without L0H\d:) +(\d+)%", text, re.M)
    ]
    assert len(weights) == len(without) == 4
    assert whole > 0.9 and min(without) < 0.5  # one head copies, and it is the one that looks back by seven
    assert weights.index(max(weights)) == without.index(min(without)) and max(weights) > 0.5
    all_keys, window = (float(re.search(rf"^{name}: +(\S+) ", text, re.M)[1]) for name in ("all keys", "window of 4"))
    assert all_keys == loss and window > 12 / 14 * math.log(8)
    assert re.search(
        r"^the model of this tour: causal: \d+ checks, lengths 1 to \d+; uses all of the past$", text, re.M
    )
    leak = r"^a leaking model: NOT causal: output (\d+) depends on input (\d+), first in the code of the model itself$"
    query, key = map(int, re.search(leak, text, re.M).groups())
    assert key == query + 1


def test_the_stored_outputs_are_complete_and_small():
    notebook = nbformat.read(TOUR, as_version=4)
    nbformat.validate(notebook)
    check_figures(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    images = [data for cell in notebook.cells for output in cell.get("outputs", []) for data in output.get("data", {})]
    assert images.count("image/png") == 1
    assert TOUR.stat().st_size < 300_000


def test_its_links_name_files():
    cells = json.loads(TOUR.read_text(encoding="utf-8"))["cells"]
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)#]+)", text)
    assert links and all((TOUR.parent / link).is_file() for link in links)


@pytest.mark.slow
def test_the_notebook_runs_from_the_start(tmp_path, monkeypatch):
    from nbclient import NotebookClient

    monkeypatch.setenv("TRIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # the notebook makes its folder there
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(TOUR, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    check_figures(notebook)
    assert len(list(tmp_path.glob("tril-tour-*/outputs/*/*/summary.json"))) == 2
