"""`inferlane up`: the demo's cluster kept running, for your own requests."""

import asyncio
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import cyclopts
from cyclopts import Parameter, validators

from ops.cli.demo import EngineChoice, PolicyChoice, leaves

if TYPE_CHECKING:  # `--help` must answer before the rest is imported.
    from ops.cluster import LocalCluster, Member
    from ops.demo.setting import Setting

app = cyclopts.App(
    name="up", help="Keep a whole cluster running on this machine, for your requests."
)

NATS_PORT = 4222
"""NATS's own; commands find it without being told."""

HTTP_PORT = 9470
GATEWAY_PORT = 9471
A_PORT = validators.Number(gte=0, lte=65535)
CONTEXT_TOKENS_OF_A_REAL_MODEL = 8192
RESTART_PAUSE_S = 1.0
"""Before a process that ended is started again."""

_WAYS_IN = """\
The cluster is up: {workers} workers, model {model}. Everything is in {folder}.

  the OpenAI API      base_url = "{gateway}/v1", api_key = "{key}"
                      curl {gateway}/v1/models -H "Authorization: Bearer {key}"
  ask                 {inferlane} submit "Hello"{url} --lane online --stream
  run a batch         {inferlane} batch run IN.jsonl{url} --lane offline --output OUT.jsonl
  look                {inferlane} workers{url}        {inferlane} lanes{url}
  in a browser        {page}
  from Python         async with Client.connect("{nats}", lane="online") as client:
                          ticket = await client.submit({{"messages": [...], "model": "{model}"}})
                          record = await ticket.result()

Ctrl-C ends it; jobs and results stay in the folder for the next `inferlane up`.
"""


@app.default
def up(  # noqa: PLR0913 - one parameter is one flag.
    *,
    gguf: Annotated[
        Path | None, Parameter(help="Serve this model; else a tiny one that talks nonsense.")
    ] = None,
    engine: Annotated[EngineChoice, Parameter(help="`fake` models a GPU and computes nothing.")] = (
        "llama"
    ),
    workers: Annotated[
        int,
        Parameter(
            help="How many workers, each with its own engine.",
            validator=validators.Number(gte=0, lte=64),
        ),
    ] = 0,
    slots: Annotated[
        int,
        Parameter(help="Jobs at once in each worker.", validator=validators.Number(gte=1, lte=256)),
    ] = 6,
    policy: Annotated[PolicyChoice, Parameter(help="How a worker is chosen.")] = "first_token",
    folder: Annotated[Path, Parameter(help="Where streams, results and logs are kept.")] = Path(
        "inferlane-up"
    ),
    port: Annotated[
        int, Parameter(help="Port of NATS; 0 for any free one.", validator=A_PORT)
    ] = NATS_PORT,
    http_port: Annotated[
        int, Parameter(help="Port of the status page; 0 for any.", validator=A_PORT)
    ] = HTTP_PORT,
    gateway_port: Annotated[
        int, Parameter(help="Port of the OpenAI API; 0 for any.", validator=A_PORT)
    ] = GATEWAY_PORT,
) -> int:
    """Run NATS, a broker, workers and a gateway until Ctrl-C, and say how to use them.

    With --gguf the default is one worker; without, four on a tiny model.
    """
    from ops.cli.up_check import check_folder, check_model_file, check_model_name, check_ports
    from ops.demo import setting

    real = gguf is not None
    count = workers or (1 if real else 4)
    model = gguf.stem if gguf is not None else setting.MODEL
    if gguf is not None:
        check_model_file(gguf)
        check_model_name(model)
    check_folder(folder)
    check_ports(nats=port, page=http_port, gateway=gateway_port)
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
        gateway_port=gateway_port,
        model=model,
    )
    return _run(wanted, workers=count, port=port)


def _run(wanted: "Setting", *, workers: int, port: int) -> int:
    """Keep a cluster up, and return the exit code."""
    from broker.bus.base import BusError
    from ops.cluster import ClusterError
    from ops.demo.run import DemoError
    from ops.nats.server import ServerUnavailable

    failed = False
    try:
        asyncio.run(_keep_up(wanted, workers=workers, port=port))
    except* (DemoError, ClusterError, BusError, ServerUnavailable) as errors:
        for error in leaves(errors):
            sys.stderr.write(f"the cluster did not come up: {error}\n")
        failed = True
    return 1 if failed else 0


async def _keep_up(wanted: "Setting", *, workers: int, port: int) -> None:
    from ops.cluster import LocalCluster

    stop = asyncio.Event()
    cluster = LocalCluster(wanted.folder, port=port)

    def on_signal() -> None:
        if stop.is_set():
            cluster.kill()
            return
        stop.set()
        sys.stderr.write("Stopping: what runs is handed back; again to stop at once ...\n")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    sys.stderr.write("Starting NATS, a broker, the workers and a gateway ...\n")
    async with cluster, asyncio.TaskGroup() as group:
        serving = group.create_task(_serve(cluster, wanted, workers=workers))
        stopping = group.create_task(stop.wait())
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        for task in (serving, stopping):
            task.cancel()


async def _serve(cluster: "LocalCluster", wanted: "Setting", *, workers: int) -> None:
    """Start everything, say how to use it, and start again what ends."""
    from broker.bus.nats import connect
    from ops.demo.run import start_members, until_ready
    from ops.demo.setting import ONLINE_KEY

    members = await start_members(cluster, wanted, workers=workers, gateways=1)
    bus = await connect(cluster.url, name="inferlane-up")
    try:
        await until_ready(bus, workers=workers)
    finally:
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
            gateway=members[-1].said.get("http", ""),
            key=ONLINE_KEY,
            inferlane=_command(),
        )
    )
    sys.stdout.flush()
    async with asyncio.TaskGroup() as group:
        for member in members:
            group.create_task(_keep_alive(member))


async def _keep_alive(member: "Member") -> None:
    while True:
        code = await member.ended()
        sys.stderr.write(f"{member.name} ended ({code}) and is started again; see {member.log}\n")
        await asyncio.sleep(RESTART_PAUSE_S)
        await member.start()


def _command() -> str:
    """How to call this program here: by its name, or by its path where PATH has it not."""
    beside = Path(sys.executable).with_name("inferlane")
    if shutil.which("inferlane"):
        return "inferlane"
    return str(beside) if beside.exists() else f"{sys.executable} -m ops.cli.main"
