"""Results stand whole or not at all."""

import os
from pathlib import Path

import pytest

from ops.cli.errors import CommandError, Misused
from ops.cli.result_files import require_writable, whole_file, write_whole


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
    with pytest.raises(CommandError, match="can't be written: no space left"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_interrupted_write_keeps_the_old_file(tmp_path: Path) -> None:
    """Ctrl-C in the middle leaves what was there, and nothing beside it."""
    path = tmp_path / "a.json"
    write_whole(path, b"old")
    with pytest.raises(KeyboardInterrupt):
        _write_and_be_interrupted(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def _write_and_be_interrupted(path: Path) -> None:
    with whole_file(path) as file:
        file.write(b"ne")
        raise KeyboardInterrupt


def test_a_file_of_a_similar_name_is_left_alone(tmp_path: Path) -> None:
    """What stands beside a result is somebody's, whatever it is called."""
    other = tmp_path / "a.json.part"
    other.write_bytes(b"mine")
    write_whole(tmp_path / "a.json", b"new")
    assert other.read_bytes() == b"mine"


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    """The name beside it is no longer."""
    path = tmp_path / ("ä" * 127)
    require_writable(path)
    write_whole(path, b"new")
    assert [one.read_bytes() for one in tmp_path.iterdir()] == [b"new"]


def test_through_a_link_the_file_behind_it_is_written(tmp_path: Path) -> None:
    """The link stays one."""
    (tmp_path / "link").symlink_to(tmp_path / "behind")
    require_writable(tmp_path / "link")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "behind").read_bytes() == b"new"


@pytest.mark.parametrize("name", ["absent/a.json", ".", "x" * 256, "loop"])
def test_place_that_cant_be_written_is_told_before(tmp_path: Path, name: str) -> None:
    """No such folder, a folder itself, a name too long, a link to itself."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(Misused, match="can't be written"):
        require_writable(None, tmp_path / name)


def test_a_device_or_a_pipe_is_no_place_for_a_result(tmp_path: Path) -> None:
    """As root, /dev/null was replaced by the report."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for place in (pipe, Path("/dev/null")):
        with pytest.raises(Misused, match="a device or a pipe; name a file"):
            require_writable(place)


def test_a_result_never_takes_the_place_of_what_is_read(tmp_path: Path) -> None:
    """However it is called: by another path, or through a link."""
    log, link = tmp_path / "log", tmp_path / "link"
    log.write_bytes(b"yesterday")
    link.symlink_to(log)
    for result in (log, tmp_path / "." / ".." / tmp_path.name / "log", link):
        with pytest.raises(Misused, match="is what is read; give the result another name"):
            require_writable(result, inputs=[None, log])
    require_writable(tmp_path / "report", inputs=[log])


def test_two_results_have_two_names(tmp_path: Path) -> None:
    """The second would take the place of the first."""
    with pytest.raises(Misused, match="named for two results"):
        require_writable(tmp_path / "a", tmp_path / "a")
