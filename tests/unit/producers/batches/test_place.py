"""Places of fetched results: what may be replaced, and what stays whatever happens."""

import os
from pathlib import Path

import pytest

from producers.batch.errors import OutputUnusable
from producers.batches.place import Place, require_own
from tests.batches import a_line

OURS = b'{"id":"batch_req_batch_1-7","custom_id":"a"}\n'


@pytest.mark.parametrize("standing", [b"", OURS, OURS + a_line("b")])
def test_what_was_fetched_before_may_be_replaced(tmp_path: Path, standing: bytes) -> None:
    """Results of a batch that runs are fetched again; an empty file is nobody's."""
    path = tmp_path / "out.jsonl"
    require_own(path, batch_id="batch_1")
    path.write_bytes(standing)
    require_own(path, batch_id="batch_1")


@pytest.mark.parametrize(
    "standing",
    [
        a_line("a"),
        b'{"id":"batch_req_batch_12-7","custom_id":"a"}\n',
        b'{"id":"batch_req_b5d6-7","custom_id":"a"}\n',
        b'{"id":7}\n',
        b"\n" + OURS,
        b"\xff\x00",
        b"[" * 100_000,
    ],
)
def test_whatever_else_stands_there_stays(tmp_path: Path, standing: bytes) -> None:
    """The input, results of another batch or of a run, a file of any other kind."""
    path = tmp_path / "out.jsonl"
    path.write_bytes(standing)
    with pytest.raises(OutputUnusable, match="move it away"):
        require_own(path, batch_id="batch_1")


def test_what_is_no_file_stays(tmp_path: Path) -> None:
    """A folder, a pipe, a device: as root one would replace it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (tmp_path, pipe, Path(os.devnull)):
        with pytest.raises(OutputUnusable, match="no regular file"):
            require_own(path, batch_id="batch_1")


def test_what_is_not_whole_takes_no_place(tmp_path: Path) -> None:
    """An end in the midst leaves what stood there, and nothing beside it."""
    path = tmp_path / ("x" * 250)
    path.write_bytes(OURS)
    place = Place(path)
    place.write(b"half")
    place.close()
    assert path.read_bytes() == OURS
    assert list(tmp_path.iterdir()) == [path]
