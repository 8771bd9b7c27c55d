"""A llama.cpp server that nobody here manages: started as a person would, on a port or a socket.

Also a program of its own: `python -m tests.llama_by_hand HOST_OR_SOCKET SLOTS` prints the address.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

TINY_GGUF = Path(__file__).parent.parent / "ops" / "tiny_model" / "tiny.gguf"

CONTEXT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class HandStarted:
    """A running server."""

    url: str
    """As an engine's `base_url`: http://host:port or unix:/path."""
    process: asyncio.subprocess.Process


@asynccontextmanager
async def a_hand_started_llama(
    *, slots: int = 2, socket_path: Path | None = None
) -> AsyncGenerator[HandStarted]:
    """Run a server on a free port, or on a Unix socket; returns once it listens."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.llama_by_hand", str(socket_path or "127.0.0.1"), str(slots)),
        cwd=Path(__file__).parent.parent,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        address = (await process.stdout.readline()).decode().strip()
        assert address, "the server did not start"
        yield HandStarted(f"unix:{socket_path}" if socket_path else address, process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def main(host: str, slots: int) -> None:
    """Serve the tiny model with default settings until standard input ends."""
    from xllamacpp import CommonParams, Server  # noqa: PLC0415 - Only this process needs it.

    params = CommonParams()
    params.model.path = str(TINY_GGUF)
    params.hostnames = [host]
    params.port = 0
    params.n_parallel = slots
    params.n_ctx = slots * CONTEXT_TOKENS
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    server = Server(params)
    print(server.listening_address, flush=True)  # noqa: T201 - What the starter waits for.
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
