"""Reading parquet files whole or by row groups, with one sentence for a damaged file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.errors import ConfigError


def read_table(path: Path, **options: Any) -> Any:
    """Return a whole table; ConfigError if it cannot be read."""
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path, **options)
    except (OSError, pyarrow.ArrowException) as error:
        raise _fault(path, error) from None


class ParquetRows:
    """Rows of a parquet file, read by row groups; the groups that were read last are kept.

    Files are mapped, so only the groups that are read take memory.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        self.path = path
        try:
            self._file = pyarrow.parquet.ParquetFile(path, memory_map=True)
        except (OSError, pyarrow.ArrowException) as error:
            raise _fault(self.path, error) from None
        facts = self._file.metadata
        counts = [facts.row_group(number).num_rows for number in range(facts.num_row_groups)]
        self._ends = np.cumsum(np.array(counts, dtype=np.int64))
        self._kept: tuple[tuple[int, int], Any] | None = None

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def rows(self, start: int, count: int) -> Any:
        """Return a table of the rows start … start + count, or fewer at the end of the file."""
        stop = min(start + count, len(self))
        if not 0 <= start < stop:
            return self._read(0, 0).slice(0, 0)
        first, last = (int(np.searchsorted(self._ends, row, side="right")) for row in (start, stop - 1))
        begin = int(self._ends[first - 1]) if first else 0
        return self._read(first, last).slice(start - begin, stop - start)

    def _read(self, first: int, last: int) -> Any:
        import pyarrow

        if self._kept is None or self._kept[0] != (first, last):
            self._kept = None  # freed before the next ones are read
            try:
                table = self._file.read_row_groups(list(range(first, last + 1)))
            except (OSError, pyarrow.ArrowException) as error:
                raise _fault(self.path, error) from None
            self._kept = (first, last), table
        return self._kept[1]

    def first_value(self, column: str) -> int:
        """Return the value of a column in the first row."""
        import pyarrow

        try:
            return int(self._file.read_row_group(0, columns=[column])[column][0].as_py())
        except (OSError, pyarrow.ArrowException) as error:
            raise _fault(self.path, error) from None

    def close(self) -> None:
        self._file.close(force=True)


def _fault(path: Path, error: BaseException) -> ConfigError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:150]
    return ConfigError(f"{path} cannot be read: it is damaged or missing ({reason})")
