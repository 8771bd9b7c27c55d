"""`inferlane worker`: run a worker agent beside an engine."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ops.cli.errors import Misused
from worker_agent.config import EngineKind


def worker(  # noqa: PLR0913  # One parameter is one flag.
    *,
    config: Annotated[Path | None, Parameter(alias="-c", env_var="INFERLANE_CONFIG")] = None,
    name: str | None = None,
    nats: str | None = None,
    engine: EngineKind | None = None,
    base_url: str | None = None,
    kv_events: str | None = None,
    kv_events_replay: str | None = None,
    gguf: Path | None = None,
    model: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    slots: int | None = None,
    drain_s_max: float | None = None,
    replace: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Serve jobs with the engine beside it, until SIGTERM: then finish what runs and leave.

    Beside vLLM, SGLang, llama.cpp or any OpenAI-compatible server:

        inferlane worker --name gpu1 --base-url http://127.0.0.1:8000

    With a llama.cpp server of its own:

        inferlane worker --name cpu1 --engine llama --gguf model.gguf --model my-model

    When it is up it prints one line of JSON on standard output; the log goes to standard error. A
    second signal leaves at once. Exit code 4: another agent runs under this name. One that is
    leaving is waited for.

    Args:
        config: TOML file with a [worker] table; the flags below go before it. An example with
            every key is ops/inferlane.toml.
        name: Name of this worker in the cluster. No two may share one.
        nats: Message server, nats://host:port.
        engine: Kind of engine.
        base_url: Where an engine of kind openai listens: http://host:port or unix:/path/of.sock.
        kv_events: Where an engine of kind openai publishes what its cache stores and evicts (vLLM,
            SGLang): ipc:///path or tcp://host:port.
        kv_events_replay: Where it replays such events that were missed.
        gguf: Model file for an engine of kind llama.
        model: A model it serves, NAME or NAME=ENGINE'S-NAME; repeat for more.
        slots: Jobs at once; never more than the engine has.
        drain_s_max: Seconds that running jobs may take to finish after SIGTERM.
        replace: Take the place of a live agent of this name: it ends, and what it runs is run again
            elsewhere.
    """
    from worker_agent import main
    from worker_agent.config import load
    from worker_agent.flags import overrides

    if config is None and name is None:
        message = "give the worker a name, --name NAME, or a file with a [worker] table, --config"
        raise Misused(message)
    given: dict[str, Any] = {
        "worker": name,
        "nats": nats,
        "engine": engine,
        "base_url": base_url,
        "kv_events": kv_events,
        "kv_events_replay": kv_events_replay,
        "gguf": None if gguf is None else str(gguf),
        "model": model,
        "slots": slots,
        "drain_s_max": drain_s_max,
    }
    return main.run(load(config, overrides=overrides(given)), replace=replace)
