"""What the link reads before it dials."""

import pytest

from broker.bus.base import BusError
from broker.bus.nats_link import parse_urls, parse_version
from broker.bus.nats_wire import Credentials

NOBODY = Credentials()


@pytest.mark.parametrize(
    ("given", "urls"),
    [
        ("nats://h:1", ("nats://h:1",)),
        ("h", ("nats://h:4222",)),
        ("h:99", ("nats://h:99",)),
        ("tls://h", ("tls://h:4222",)),
        ("nats://a:1, b:2", ("nats://a:1", "nats://b:2")),
        (["a", "nats://b:2"], ("nats://a:4222", "nats://b:2")),
        ("nats://[::1]:4222", ("nats://[::1]:4222",)),
    ],
)
def test_urls(given: str | list[str], urls: tuple[str, ...]) -> None:
    """With and without scheme and port, one or several."""
    assert parse_urls(given, NOBODY).urls == urls


def test_user_in_a_url() -> None:
    """A user or token in a URL is taken out of it and used on all servers, discovered ones too."""
    options = parse_urls("nats://lane:p%40ss@h:1", NOBODY)
    assert options.urls == ("nats://h:1",)
    assert (options.credentials.user, options.credentials.password) == ("lane", "p@ss")
    assert parse_urls("nats://secret@h:1", NOBODY).credentials.token == "secret"


def test_given_credentials_go_before_those_in_a_url() -> None:
    """What is configured beside the URL wins."""
    options = parse_urls("nats://a:b@h", Credentials(user="c", password="d"))
    assert (options.credentials.user, options.credentials.password) == ("c", "d")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://h",
        "nats://",
        "ws://h:1",
        "a,,b",
        "h:99999",
        "h:-1",
        "h:0",
        "h:abc",
        "[::1",
        "::",
    ],
)
def test_not_a_url(url: str) -> None:
    """Other schemes, empty hosts and impossible ports are refused with the URL, in one sentence."""
    with pytest.raises(BusError, match="not a NATS URL"):
        parse_urls(url, NOBODY)


def test_password_is_not_shown() -> None:
    """Credentials that land in a log or a traceback hide their secrets."""
    shown = repr(Credentials(user="lane", password="hush", token="quiet"))
    assert "lane" in shown
    assert "hush" not in shown
    assert "quiet" not in shown


@pytest.mark.parametrize(
    ("text", "version"),
    [("2.15.1", (2, 15, 1)), ("2.12.0-RC.1", (2, 12, 0)), ("", ()), ("x", ())],
)
def test_versions(text: str, version: tuple[int, ...]) -> None:
    """Releases and previews; nonsense is older than everything."""
    assert parse_version(text) == version
