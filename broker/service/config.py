"""The one TOML file, read for the broker: `load` a path, `loads` a text, or take the defaults.

The records are in `config_records`, what must agree between them in `config_checks`.
"""

from collections.abc import Sequence
from pathlib import Path

from broker.core.policy import LanePolicy, Policy
from broker.disk.named_file import read_named
from broker.service.config_checks import check
from broker.service.config_records import BrokerConfig, Config, NatsConfig, StreamsConfig
from broker.wire import settings
from broker.wire.settings import Problem, Settings, SettingsError

__all__ = [
    "BrokerConfig",
    "Config",
    "ConfigError",
    "NatsConfig",
    "StreamsConfig",
    "default_config",
    "load",
    "loads",
]

ConfigError = SettingsError
"""What `load` and `loads` raise: every problem with its line, key, and what to do."""


def load(path: Path) -> Config:
    """Read a configuration file.

    Raises ConfigError, whose text names file, line, key and what to do.
    """
    try:
        data = read_named(path, bytes_max=settings.SETTINGS_BYTES_MAX)
    except OSError as error:
        message = f"cannot be read: {(error.strerror or str(error)).lower()}"
        raise ConfigError(str(path), (Problem(line=0, key="", message=message),)) from error
    return _judge(settings.parse(data, source=str(path)))


def loads(text: str, *, source: str = "configuration") -> Config:
    """Read a configuration text; `source` is what errors call it. Raises ConfigError."""
    return _judge(settings.parse(text.encode(), source=source))


def default_config(*, lanes: Sequence[str], models: Sequence[str]) -> Config:
    """Make a configuration with the defaults for these lanes and models. Raises ConfigError."""
    policy = Policy(models=tuple(models), lanes=tuple(LanePolicy(name=lane) for lane in lanes))
    config = Config(policy=policy)
    problems = tuple(
        Problem(line=0, key=settings.key_text(path), message=message)
        for path, message in check(config)
    )
    if problems:
        source = "configuration"
        raise ConfigError(source, problems)
    return config


def _judge(document: Settings) -> Config:
    config = document.read(Config)
    problems = [document.problem(path, message) for path, message in check(config)]
    if problems:
        raise document.error(*problems)
    return config
