"""Whose a state_dir is; what can't be locked keeps no broker from leading."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog

from broker.disk.folder_lock import LOCK_FILE
from broker.service import state_folder as module
from broker.service.config_records import BrokerConfig
from broker.service.state_folder import StateTaken, own_state


def a_config(folder: Path, *, log_bytes_max: int = 1000) -> BrokerConfig:
    """A broker's table."""
    return BrokerConfig(state_dir=str(folder), decision_log_bytes_max=log_bytes_max)


def test_a_folder_is_one_brokers(tmp_path: Path) -> None:
    """The second is told whose; after the first it is free."""
    config = a_config(tmp_path / "state")
    with own_state(config):
        assert (tmp_path / "state" / LOCK_FILE).exists()
        with pytest.raises(StateTaken, match="in use by another broker"), own_state(config):
            pytest.fail("held twice")
    with own_state(config):
        pass


def test_without_a_log_there_is_no_folder(tmp_path: Path) -> None:
    """Nothing is made."""
    config = a_config(tmp_path / "state", log_bytes_max=0)
    with own_state(config), own_state(config):
        assert not (tmp_path / "state").exists()


def test_what_can_not_be_locked_is_gone_on_without(tmp_path: Path) -> None:
    """And logged."""
    (tmp_path / "file").touch()
    config = a_config(tmp_path / "file" / "state")
    with structlog.testing.capture_logs() as logs, own_state(config), own_state(config):
        pass
    assert [one["event"] for one in logs] == ["broker.state_not_locked"] * 2


def test_a_disk_that_hangs_is_waited_for_within_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LOCK_S_MAX: a share whose server is away must not keep a broker from leading."""
    answers = threading.Event()

    @contextmanager
    def hanging(folder: Path) -> Generator[None]:
        del folder
        answers.wait(60)
        yield

    monkeypatch.setattr(module, "held", hanging)
    monkeypatch.setattr(module, "LOCK_S_MAX", 0.01)
    with structlog.testing.capture_logs() as logs, own_state(a_config(tmp_path)):
        answers.set()
    assert logs[0]["error"] == "its disk hangs"
