"""`inferlane gateway`: the OpenAI API over HTTP, until SIGTERM."""

from pathlib import Path
from typing import Annotated

import cyclopts
from cyclopts import Parameter

from ops.cli.errors import Misused, Unreachable

app = cyclopts.App(name="gateway")

DEFAULT_FILE = Path("inferlane.toml")


@app.default
def gateway(
    *,
    config: Annotated[Path | None, Parameter(alias="-c", env_var="INFERLANE_CONFIG")] = None,
    host: str | None = None,
    port: int | None = None,
    nats: str | None = None,
) -> None:
    r"""Answer the OpenAI API over HTTP, until SIGTERM or Ctrl-C.

    Bearer keys stand in the configuration, each with its lane. Start as many gateways as you like:
    they share nothing but NATS.

        curl http://127.0.0.1:9471/v1/chat/completions -H "Authorization: Bearer sk-..." \
          -H "Content-Type: application/json" -d '{"model": "...", "messages": [...]}'

    When it is up it prints one line of JSON on standard output, with its address. The log goes to
    standard error. On SIGTERM it takes nothing new, and answers under way get gateway.drain_s_max
    to end; a second signal cuts them off and cancels their jobs.

    Args:
        config: Configuration file; without it ./inferlane.toml. An example with every key is
            ops/inferlane.toml.
        host: Instead of gateway.host.
        port: Instead of gateway.port; 0 takes any free port.
        nats: Message server, nats://host:port, instead of nats.url.
    """
    from producers import errors
    from producers.gateway import main
    from producers.gateway.config import load

    path = config or _default_file()
    try:
        chosen = load(path, host=host, port=port, nats=nats)
    except OSError as error:
        message = f"{path} can't be read: {(error.strerror or str(error)).lower()}"
        raise Misused(message) from error
    try:
        main.run(chosen)
    except errors.BadLink as error:
        raise Misused(str(error)) from error
    except errors.Unreachable as error:
        raise Unreachable(str(error)) from error


def _default_file() -> Path:
    if not DEFAULT_FILE.exists():
        message = (
            f"no configuration: give --config FILE, or put {DEFAULT_FILE} here (copy"
            " ops/inferlane.toml, which explains every key)"
        )
        raise Misused(message)
    return DEFAULT_FILE
