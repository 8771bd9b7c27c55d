"""`inferlane up`: the demo's cluster kept running, for your own requests."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import cyclopts
from cyclopts import Parameter

from ops.cli.demo import EngineChoice, PolicyChoice, leaves

if TYPE_CHECKING:  # `--help` must answer before the rest is imported.
    from ops.demo.setting import Setting

app = cyclopts.App(
    name="up", help="Keep a whole cluster running on this machine, for your requests."
)

NATS_PORT = 4222
"""NATS's own; commands find it without being told."""

HTTP_PORT = 9470
CONTEXT_TOKENS_OF_A_REAL_MODEL = 8192

_WAYS_IN = """\
The cluster is up: {workers} workers, model {model}. Everything is in {folder}.

  ask                 inferlane submit "Hello"{url} --lane online --stream
  run a batch         inferlane batch run IN.jsonl{url} --lane offline --output OUT.jsonl
  look                inferlane workers{url}        inferlane lanes{url}
  in a browser        {page}
  from Python         async with Client.connect("{nats}", lane="online") as client:
                          ticket = await client.submit({{"messages": [...], "model": "{model}"}})
                          record = await ticket.result()

Ctrl-C ends it; jobs and results stay in the folder for the next `inferlane up`.
"""


@app.default
def up(
    *,
    gguf: Annotated[
        Path | None, Parameter(help="Serve this model; else a tiny one that talks nonsense.")
    ] = None,
    engine: Annotated[EngineChoice, Parameter(help="`fake` models a GPU and computes nothing.")] = (
        "llama"
    ),
    workers: Annotated[int, Parameter(help="How many workers, each with its own engine.")] = 0,
    slots: Annotated[int, Parameter(help="Jobs at once in each worker.")] = 6,
    policy: Annotated[PolicyChoice, Parameter(help="How a worker is chosen.")] = "first_token",
    folder: Annotated[Path, Parameter(help="Where streams, results and logs are kept.")] = Path(
        "inferlane-up"
    ),
    port: Annotated[int, Parameter(help="Port of NATS; 0 for any free one.")] = NATS_PORT,
    http_port: Annotated[int, Parameter(help="Port of the status page; 0 for any.")] = HTTP_PORT,
) -> int:
    """Run NATS, a broker and workers until Ctrl-C, and say how to use them.

    With --gguf the default is one worker; without, four on a tiny model.
    """
    from broker.bus.base import BusError
    from ops.cluster import ClusterError
    from ops.demo import setting
    from ops.demo.run import DemoError
    from ops.nats.server import ServerUnavailable

    if gguf is not None and not gguf.is_file():
        sys.stderr.write(f"there is no model file {gguf}; name a GGUF file\n")
        return 2
    real = gguf is not None
    count = workers or (1 if real else 4)
    wanted = setting.Setting(
        folder=folder.resolve(),
        url="",
        engine=engine,
        policy=policy,
        slots=slots,
        gguf=gguf.resolve() if gguf is not None else setting.TINY_GGUF,
        context_tokens=CONTEXT_TOKENS_OF_A_REAL_MODEL if real else setting.CONTEXT_TOKENS,
        threads=max(1, (os.cpu_count() or 1) // count) if real else 1,
        http_port=http_port,
        model=gguf.stem if gguf is not None else setting.MODEL,
    )
    failed = False
    try:
        asyncio.run(_keep_up(wanted, workers=count, port=port))
    except* (DemoError, ClusterError, BusError, ServerUnavailable) as errors:
        for error in leaves(errors):
            sys.stderr.write(f"the cluster did not come up: {error}\n")
        failed = True
    return 1 if failed else 0


async def _keep_up(wanted: "Setting", *, workers: int, port: int) -> None:
    from broker.bus.nats import connect
    from ops.cluster import LocalCluster
    from ops.demo.run import start_members, until_ready

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    sys.stderr.write("Starting NATS, a broker and the workers ...\n")
    async with LocalCluster(wanted.folder, port=port) as cluster:
        members = await start_members(cluster, wanted, workers=workers)
        bus = await connect(cluster.url, name="inferlane-up")
        await until_ready(bus, workers=workers)
        await bus.close()
        is_default = cluster.server.port == NATS_PORT
        sys.stdout.write(
            _WAYS_IN.format(
                workers=workers,
                model=wanted.model,
                folder=wanted.folder,
                nats=cluster.url,
                url="" if is_default else f" --url {cluster.url}",
                page=members[0].said.get("http", ""),
            )
        )
        sys.stdout.flush()
        await stop.wait()
        sys.stderr.write("Stopping: running jobs are handed back, and run at the next start ...\n")
