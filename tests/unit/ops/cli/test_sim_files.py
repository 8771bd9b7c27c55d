"""Results stand whole or not at all."""

from pathlib import Path

import pytest

from ops.cli.errors import Misused
from ops.cli.sim_files import require_writable, write_whole


def test_write_replaces_in_one_step(tmp_path: Path) -> None:
    """The new text stands, and nothing beside it."""
    path = tmp_path / "a.json"
    write_whole(path, b"old")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk costs the new result, not the old one."""
    path = tmp_path / "a.json"
    write_whole(path, b"old")

    def full(self: Path, _: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["absent/a.json", "."])
def test_place_that_cant_be_written_is_told_before(tmp_path: Path, name: str) -> None:
    """No such folder, or a folder itself."""
    with pytest.raises(Misused, match="can't be written"):
        require_writable(None, tmp_path / name)
