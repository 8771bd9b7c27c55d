"""The `inferlane` command: finds the subcommand, runs it, and turns its end into an exit code.

A subcommand is a module of this package. It is imported when it is asked for, or for `--help`.
"""

import io
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

import cyclopts
import structlog

from ops.cli.errors import EXIT_CODES, ExitCode, explain

DEBUG_FLAG = "--debug"
DEBUG_VARIABLE = "INFERLANE_DEBUG"

HELP = """\
A broker for LLM inference jobs, batch and online, over NATS. It decides which
job may run now, and on which worker, so that prompts meet the cache that knows
them.

First steps:

    inferlane demo      a whole cluster on this machine, for under a minute
    inferlane up        the same, kept running for you
    inferlane doctor    what a cluster of your own still lacks

A cluster of your own is nats-server, `inferlane broker --config FILE`, and
`inferlane worker` beside each engine. Then `inferlane submit "Hello"`, or
`inferlane batch run IN.jsonl --lane main --output OUT.jsonl`.
"""

EPILOGUE = f"""\
{DEBUG_FLAG} shows where an error comes from. {EXIT_CODES}
"""


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: `inferlane <name>`."""

    name: str
    group: str
    target: str = "app"
    """What its module has to show: a cyclopts App, or a function."""


START = "Start here"
RUN = "Run"
WORK = "Send work"
LOOK = "Look and steer"
SIMULATE = "Try and simulate"

COMMANDS = (
    Command("demo", START),
    Command("up", START),
    Command("ab", START),
    Command("broker", RUN),
    Command("worker", RUN, "worker"),
    Command("gateway", RUN),
    Command("config", RUN),
    Command("submit", WORK),
    Command("batch", WORK),
    Command("job", WORK),
    Command("cancel", WORK),
    Command("workers", LOOK),
    Command("lanes", LOOK),
    Command("usage", LOOK),
    Command("drain", LOOK),
    Command("dlq", LOOK),
    Command("erase", LOOK),
    Command("decisions", LOOK),
    Command("reconcile", LOOK),
    Command("doctor", LOOK),
    Command("chaos", SIMULATE),
    Command("sim", SIMULATE),
    Command("replay", SIMULATE),
)


def make_app(asked: str = "") -> cyclopts.App:
    """Make the command with all its subcommands; with `asked`, only that one is imported."""
    app = cyclopts.App(
        name="inferlane",
        help=HELP,
        help_epilogue=EPILOGUE,
        help_format="markdown",
        version=version("inferlane"),
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    groups = {name: cyclopts.Group(name, sort_key=index) for index, name in enumerate(GROUPS)}
    others_are_lazy = asked in {command.name for command in COMMANDS}
    for command in COMMANDS:
        module = f"ops.cli.{command.name}"
        if find_spec(module) is None:
            continue
        if others_are_lazy and command.name != asked:
            app.command(f"{module}:{command.target}", name=command.name)
        else:
            _register(app, getattr(import_module(module), command.target), command, groups)
    return app


def _register(
    app: cyclopts.App,
    target: cyclopts.App | Callable[..., object],
    command: Command,
    groups: Mapping[str, cyclopts.Group],
) -> None:
    if isinstance(target, cyclopts.App):
        target.group = groups[command.group]
        app.command(target, name=command.name)
    else:
        app.command(target, name=command.name, group=groups[command.group])


GROUPS = (START, RUN, WORK, LOOK, SIMULATE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = take_debug(given)
    _make_streams_whole()
    _log_to_stderr(debug=debug)
    try:
        result = make_app(_asked(given))(given, exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except cyclopts.CycloptsError as error:
        return _fail(f"{_misuse(error, given)} See `inferlane --help`.", ExitCode.USAGE)
    except BrokenPipeError:
        # The reader (`head`, a pager) has had enough. Keep Python from failing again at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except KeyboardInterrupt:
        # Not explained like other ends: that would load modules, and Ctrl-C may come again.
        if debug:
            raise
        return _fail("interrupted", ExitCode.INTERRUPTED)
    except Exception as error:
        if debug:
            raise
        return _fail(*explain(error))
    return result if isinstance(result, int) else ExitCode.OK


def _make_streams_whole() -> None:
    """Stand in for what was closed (`>&-`), and never fail on a character that has no place."""
    if sys.stdout is None:
        sys.stdout = _nowhere()
    if sys.stderr is None:
        sys.stderr = _nowhere()
    out: TextIO = sys.stdout
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="backslashreplace")


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w")


def _fail(text: str, code: ExitCode) -> ExitCode:
    from ops.cli.output import note

    note(f"inferlane: {text}")
    return code


def _misuse(error: cyclopts.CycloptsError, arguments: Sequence[str]) -> str:
    """Say what is wrong in the arguments; a value with a dash before it isn't taken for absent."""
    if isinstance(error, cyclopts.MissingArgumentError) and error.keyword in arguments:
        following = arguments[arguments.index(error.keyword) + 1 :]
        if following and following[0].startswith("-") and not following[0].startswith("--"):
            return f"{error.keyword} takes no value that begins with a dash: {following[0]!r}."
    return str(error)


def _asked(arguments: Sequence[str]) -> str:
    return next((one for one in arguments if not one.startswith("-")), "")


def take_debug(arguments: list[str]) -> bool:
    """Say whether a traceback is wanted; --debug, wherever it stands, is taken out."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    asked = DEBUG_FLAG in arguments[:end]
    if asked:
        arguments[:end] = [one for one in arguments[:end] if one != DEBUG_FLAG]
    return asked or os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


def _log_to_stderr(*, debug: bool) -> None:
    """Keep standard output for answers: logs of what a command uses go to standard error."""
    level = logging.DEBUG if debug else logging.ERROR
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(level),
        # Standard error as it is at each line, not as it was when this command began.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )


if __name__ == "__main__":
    from ops.cli.entry import main as program

    sys.exit(program())
