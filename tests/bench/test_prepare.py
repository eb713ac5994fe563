"""bench.prepare names its own setting, `source`, in what it refuses."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bench.prepare import check_files
from errors import UserError


def write_text(folder: Path) -> Path:
    (folder / "a.txt").write_text("text")
    return folder / "a.txt"


def write_other_column(folder: Path) -> Path:
    pq.write_table(pa.table({"body": ["text"]}), folder / "a.parquet")
    return folder / "a.parquet"


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lambda folder: folder / "b", r"matches no file .*; set another source$"),
        (write_text, r"includes .*a\.txt; name \.parquet files only"),
        (write_other_column, r"includes .*a\.parquet without a column text; name files that have one"),
    ],
    ids=["no file", "text file", "other column"],
)
def test_files_that_one_of_the_ways_cannot_read_are_refused(write, problem, tmp_path):
    source = write(tmp_path)
    with pytest.raises(UserError, match=f"^source={source} {problem}"):
        check_files(str(source))
