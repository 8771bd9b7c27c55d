"""The `inferlane` program: the command, and how Ctrl-C ends it.

While its modules load nothing is begun, and Ctrl-C ends it without a word. Later a command tells
what became of its work; then the process dies of the signal, as shells expect: one that ended with
a code of its own would have taken Ctrl-C for itself, and a loop around it would go on. Once a
command has ended, however it did, Ctrl-C ends the process without a word again.

Whoever starts it may have closed its standard streams (`<&-`, some schedulers): then nothing else
may take their places. The event loop gives up the process when one of its sockets stands there, and
what prints would write into a file that does.
"""

import os
import signal
import sys
from contextlib import suppress


def main() -> int:
    """Run the command line; return its exit code, or die of SIGINT when it was interrupted."""
    _hold_standard_streams()
    # Not where it is ignored already, as behind `nohup` or `&` in a script.
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ops.cli import main as command
    from ops.cli.errors import ExitCode

    if is_heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        try:
            code = command.main()
        finally:
            if is_heard:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:
        if command.take_debug(sys.argv[1:]):
            raise
        code = ExitCode.INTERRUPTED  # A second one, while it told of the first.
    if code == ExitCode.INTERRUPTED:
        _die_of_sigint()
    return code


def _hold_standard_streams() -> None:
    """Let nothing stand where a standard stream was closed; children have the same nothing."""
    for stream in range(3):
        try:
            os.fstat(stream)
        except OSError:
            # The lowest place that is free: this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # noqa: FBT003
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - no path; for all its life.


def _die_of_sigint() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # Whoever read it is gone.
            stream.flush()
    os.kill(os.getpid(), signal.SIGINT)
