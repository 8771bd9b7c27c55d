"""What can be told to be wrong before `inferlane up` starts anything."""

import socket
from pathlib import Path

from broker.disk.named_file import open_named
from broker.wire.ids import MalformedName, escape_model
from ops.cli.errors import CommandError, Misused

GGUF_MAGIC = b"GGUF"

UNQUOTABLE = frozenset('"\\\n\r')
"""Characters that can't stand in a path which configuration files name."""


def check_folder(folder: Path) -> None:
    """Raises Misused when the folder's name can't stand in the cluster's configuration."""
    if UNQUOTABLE & set(str(folder)):
        message = f"{folder}: no quotes, backslashes or line breaks in a --folder, please"
        raise Misused(message)


def check_model_file(gguf: Path) -> None:
    """Raises Misused when this is no GGUF file."""
    if UNQUOTABLE & set(str(gguf)):
        message = f"{gguf}: no quotes, backslashes or line breaks in the path of --gguf, please"
        raise Misused(message)
    try:
        with open_named(gguf) as file:
            magic = file.read(len(GGUF_MAGIC))
    except OSError as error:
        message = f"there is no model file {gguf} ({error.strerror}); name a GGUF file"
        raise Misused(message) from error
    if magic != GGUF_MAGIC:
        message = f"{gguf} is no GGUF file; llama.cpp's convert_hf_to_gguf.py makes one"
        raise Misused(message)


def check_model_name(name: str) -> None:
    """Raises Misused when requests can't ask for a model of this name."""
    try:
        escape_model(name)
    except MalformedName as error:
        message = f"{name!r} is too long for a model's name; link the file under a shorter one"
        raise Misused(message) from error


def check_ports(*, nats: int, page: int, gateway: int) -> None:
    """Raises CommandError when something listens already on a port of the cluster."""
    check_port(nats, option="--port", what="NATS")
    check_port(page, option="--http-port", what="the status page")
    check_port(gateway, option="--gateway-port", what="the OpenAI API")


def check_port(port: int, *, option: str, what: str) -> None:
    """Raises CommandError when something listens there already."""
    if not port:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            message = (
                f"port {port} for {what} can't be had ({error.strerror}): is another "
                f"`inferlane up` running? Give another {option}, or 0 for any free one"
            )
            raise CommandError(message) from error
