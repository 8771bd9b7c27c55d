"""`inferlane broker`: run a broker, leader or standby, until SIGTERM."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import cyclopts
from cyclopts import Parameter

from ops.cli.errors import CommandError, Misused

if TYPE_CHECKING:
    from broker.service.config import Config

app = cyclopts.App(name="broker")

DEFAULT_FILE = Path("inferlane.toml")


@app.default
def broker(
    *,
    config: Annotated[Path | None, Parameter(alias="-c", env_var="INFERLANE_CONFIG")] = None,
    name: str | None = None,
    http_port: int | None = None,
    state_dir: Path | None = None,
) -> None:
    """Run a broker until SIGTERM or Ctrl-C.

    Of several brokers with the same NATS, one leads and the others stand by: if it dies, another
    takes over within seconds, and running jobs run on. It makes the streams of the lanes in its
    configuration if they are not there yet.

    When it is up it prints one line of JSON on standard output, with the address of its status
    page. The log goes to standard error, as JSON lines.

    Args:
        config: Configuration file; without it ./inferlane.toml. An example with every key is
            ops/inferlane.toml.
        name: Instead of broker.name; of two brokers with one file, give each its own.
        http_port: Instead of broker.http_port; 0 takes any free port.
        state_dir: Instead of broker.state_dir; no two brokers may share one.
    """
    from broker.service import main
    from broker.service.state_folder import StateTaken

    path = config or _default_file()
    reread = partial(_configured, path, name=name, http_port=http_port, state_dir=state_dir)
    try:
        main.run(reread(), reread=reread)
    except StateTaken as error:
        raise CommandError(str(error)) from error


def _default_file() -> Path:
    if not DEFAULT_FILE.exists():
        message = (
            f"no configuration: give --config FILE, or put {DEFAULT_FILE} here (copy"
            " ops/inferlane.toml, which explains every key)"
        )
        raise Misused(message)
    return DEFAULT_FILE


def _configured(
    path: Path, *, name: str | None, http_port: int | None, state_dir: Path | None
) -> "Config":
    """Read the file and let the flags go before it. Raises ConfigError."""
    import msgspec

    from broker.service.config import ConfigError, load
    from broker.wire.settings import Problem

    config = load(path)
    if not config.policy.lanes:
        problem = Problem(0, "policy", "a broker needs [policy] with models and lanes")
        raise ConfigError(str(path), (problem,))
    folder = None if state_dir is None else str(state_dir)
    given = {"name": name, "http_port": http_port, "state_dir": folder}
    fields = {key: value for key, value in given.items() if value is not None}
    broker_table = msgspec.to_builtins(config.broker) | fields
    try:
        return msgspec.structs.replace(
            config, broker=msgspec.convert(broker_table, type(config.broker))
        )
    except msgspec.ValidationError as error:
        flags = "--name, --http-port or --state-dir"
        raise ConfigError(flags, (Problem(0, "", str(error)),)) from error
