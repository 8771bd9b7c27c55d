"""Command-line flags of the agent: a configuration file, and single settings over it."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.wire.settings import SettingsError
from worker_agent import config as settings
from worker_agent.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class Flags:
    """What a command line says."""

    config: WorkerConfig
    replace: bool
    """Take the place of a live agent of the same name."""


def parse_flags(arguments: Sequence[str]) -> Flags | None:
    """Read flags; None after a mistake, which was told on standard error."""
    given = vars(_parser().parse_args(arguments))
    replace = bool(given.pop("replace"))
    try:
        config = settings.load(given.pop("config"), overrides=overrides(given))
    except (SettingsError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return None
    return Flags(config, replace)


def model_names(pairs: Sequence[str]) -> dict[str, str]:
    """Read `served` or `served=engine's own name`, one each."""
    split = (pair.partition("=") for pair in pairs)
    return {served: own or served for served, _, own in split}


def overrides(given: Mapping[str, Any]) -> dict[str, Any]:
    """Turn flags (None or empty = not given) into settings, keyed as in the file."""
    chosen = {name: value for name, value in given.items() if value not in (None, (), [])}
    if models := chosen.pop("model", None):
        chosen["models"] = model_names(models)
    if url := chosen.pop("nats", None):
        chosen["nats"] = {"url": url}
    return chosen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m worker_agent.main", description="Serve jobs with the engine beside it."
    )
    parser.add_argument("--config", type=Path, help="TOML file with a [worker] table")
    parser.add_argument("--worker", help="name of this worker; no two may share one")
    parser.add_argument("--nats", metavar="URL", help="message server")
    parser.add_argument("--engine", choices=("openai", "llama", "fake"))
    parser.add_argument("--base-url", help="openai: http://host:port or unix:/path/of.sock")
    parser.add_argument("--kv-events", metavar="URL", help="openai: its KV-cache events, ipc://...")
    parser.add_argument("--kv-events-replay", metavar="URL", help="openai: replay of missed ones")
    parser.add_argument("--gguf", help="llama: the model file")
    parser.add_argument("--slots", type=int, help="jobs at once")
    parser.add_argument(
        "--model",
        action="append",
        metavar="NAME[=ENGINE'S]",
        help="a model it serves; repeat for more",
    )
    parser.add_argument("--replace", action="store_true", help="end a live agent of this name")
    parser.add_argument("--drain-s-max", type=float, help="longest drain after SIGTERM")
    return parser
