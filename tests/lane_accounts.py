"""A server with the accounts that `ops/docs/protocol.md` gives the core and one lane."""

from pathlib import Path

from ops.nats.server import NatsServer, ServerOptions
from tests.protocol_page import PAGE, blocks

USER, PASSWORD = "lane", "secret"
"""Of the lane's account."""


def a_server_of(lane: str, folder: Path) -> NatsServer:
    """A server, not started, with a core account and one of `lane`.

    Who gives no name is of the core account, as broker, workers and tests are.
    """
    (accounts,) = blocks(PAGE.read_text(), "conf")
    for mine, theirs in (
        ("user: acme", f"user: {USER}"),
        ("$ACME_NATS_PASSWORD", PASSWORD),
        ("$INFERLANE_NATS_PASSWORD", "core"),
        ("ACME", "TENANT"),
        ("acme", lane),
    ):
        assert mine in accounts
        accounts = accounts.replace(mine, theirs)
    return NatsServer(folder, options=ServerOptions(extra=f"{accounts}\nno_auth_user: inferlane"))
