"""`inferlane sim`: policies, ours and the field's, on a trace in virtual time.

Each subcommand is a module of its own: `ops.cli.sim_<name>`, with a function of that name.
"""

from importlib import import_module
from importlib.util import find_spec

import cyclopts

SUBCOMMANDS = ("run", "compare", "sweep", "fuzz")

app = cyclopts.App(
    name="sim", help="Try policies, ours and the field's, on a trace in virtual time."
)

for name in SUBCOMMANDS:
    module = f"ops.cli.sim_{name}"
    if find_spec(module) is not None:
        app.command(getattr(import_module(module), name), name=name)
