"""The csv file of a run; the trackers of configs/logger are in trackers.py."""

import csv
import io
from pathlib import Path

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers.csv_logs import CSVLogger, ExperimentWriter

from tril.model.atomic_files import atomic_path


class RunLog(CSVLogger):
    """Lightning's CSVLogger, but a resumed run continues the file of the run: save_dir/csv/version_0/metrics.csv.

    Every row is on disk when it is logged.
    """

    def __init__(self, save_dir: str | Path) -> None:
        super().__init__(save_dir, name="csv", version=0, flush_logs_every_n_steps=1)

    @property
    @rank_zero_experiment
    def experiment(self) -> "RowWriter":
        if not isinstance(self._experiment, RowWriter):
            self._experiment = RowWriter(self.log_dir)
        return self._experiment

    def start_after(self, step: int | None) -> None:
        """Keeps the rows up to a step, which a resumed run continues; None: a new run, which has no rows."""
        path = Path(self.log_dir, "metrics.csv")
        if path.is_file():
            rows = [] if step is None else complete_rows(path)
            write_rows(path, [row for row in rows if int(row["step"]) <= (step or 0)])


class RowWriter(ExperimentWriter):
    """Continues an existing file, and replaces it as a whole when a new column comes."""

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        if (path := Path(self.metrics_file_path)).is_file():
            with path.open(encoding="utf-8", newline="") as file:
                self.metrics_keys = next(csv.reader(file), [])

    def _check_log_dir_exists(self) -> None:
        """Lightning's would remove the file."""

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        path = Path(self.metrics_file_path)
        write_rows(path, complete_rows(path), fieldnames)


def complete_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a csv file without its last line, if that is incomplete because the process was killed."""
    lines = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [row for row in csv.DictReader(io.StringIO(lines)) if (row.get("step") or "").isdigit()]


def write_rows(path: Path, rows: list[dict[str, str]], columns: list[str] | None = None) -> None:
    """Writes a csv file atomically; without rows and columns there is no file."""
    columns = columns or sorted({column for row in rows for column in row})
    if not columns:
        return path.unlink(missing_ok=True)
    with atomic_path(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return None
