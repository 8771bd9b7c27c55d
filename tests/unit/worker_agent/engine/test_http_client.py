"""Addresses and headers, without a socket."""

import pytest

from worker_agent.engine.http_client import SOCKET_PATH_BYTES_MAX, address, header_text


@pytest.mark.parametrize(
    ("base_url", "expected"),
    [
        ("http://127.0.0.1:8000", ("http://127.0.0.1:8000", "")),
        ("http://127.0.0.1:8000/", ("http://127.0.0.1:8000", "")),
        ("http://127.0.0.1:8000/v1", ("http://127.0.0.1:8000", "")),
        ("https://host/engine/v1/", ("https://host/engine", "")),
        ("unix:/run/engine.sock", ("http://engine", "/run/engine.sock")),
        ("unix:///run/engine.sock", ("http://engine", "/run/engine.sock")),
    ],
)
def test_address(base_url: str, expected: tuple[str, str]) -> None:
    """As people write it: with or without /v1, one slash or three."""
    assert address(base_url) == expected


@pytest.mark.parametrize(
    "base_url",
    [
        "",
        "127.0.0.1:8000",
        "ftp://host",
        "http://",
        "http://h:99999",
        "http://h:x",
        "http://h:0",
        "http://[::1",
        "unix:",
        "unix:relative.sock",
    ],
)
def test_address_that_is_none(base_url: str) -> None:
    """A mistake is told at once, in a sentence that shows the right form."""
    with pytest.raises(ValueError, match="unix:/"):
        address(base_url)


def test_socket_path_bound() -> None:
    """A path longer than the kernel takes is told before the first connection fails."""
    longest = "/" + "a" * (SOCKET_PATH_BYTES_MAX - 1)
    assert address(f"unix:{longest}")[1] == longest
    with pytest.raises(ValueError, match="at most 107 bytes"):
        address(f"unix:{longest}a")
    with pytest.raises(ValueError, match="at most 107 bytes"):
        address("unix:/" + "ä" * 60)


def test_header_text_drops_what_may_not_stand_in_a_header() -> None:
    """A caller's request id can't break out of its header."""
    assert header_text("job-1\r\nX-Evil: 1\x00 ä") == "job-1X-Evil:1"
