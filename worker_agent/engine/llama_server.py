"""The llama.cpp server as a process of its own, beside the agent that starts it.

`python -m worker_agent.engine.llama_server OPTIONS PARENT`: options as JSON, and the agent's
process id. The process says READY on standard output once the model is loaded and the socket
answers, and ends when its standard input does: so it never outlives the agent, however that died.
While the model loads, the interpreter stands still inside llama.cpp; for that time the kernel is
asked to end the process with its parent.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

from msgspec import Struct, json

READY = b"READY\n"

_PR_SET_PDEATHSIG = 1

_VERBOSITY_ERRORS = 1
"""llama.cpp's level for errors alone; the next ones write lines for each request, without end."""


class LlamaOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to run one llama.cpp server."""

    gguf: str
    """Path of the model file."""
    model: str
    """Name that the server lists."""
    slots: int = 6
    """Sequences at once; each keeps the KV cache of its last prompt."""
    context_tokens: int = 4096
    """Longest prompt + answer of one sequence."""
    threads: int = 1
    """Engines that share a host stand in each other's way with more than one thread each."""
    cache_ram_mib: int = 0
    """Host memory for caches that left their slot. Off: with it, every worker holds every prefix of
    a small demo, and routing has nothing to win."""
    flash_attention: bool = False
    """Off: without a GPU it makes decoding three times slower (tiny model, 2,000 tokens of context:
    1.3 against 0.4 ms a token; a warm prompt 41 against 5 ms)."""
    socket_path: str = ""


def serve(options: LlamaOptions) -> None:
    """Load the model, serve it on the socket, and return when standard input ends."""
    # Here, because only this process needs its 34 MB.
    from xllamacpp import CommonParams, Server, llama_flash_attn_type  # noqa: PLC0415

    params = CommonParams()
    params.model.path = options.gguf
    params.model_alias = {options.model}
    params.n_parallel = options.slots
    params.n_ctx = options.slots * options.context_tokens
    params.cpuparams.n_threads = options.threads
    params.cpuparams_batch.n_threads = options.threads
    params.cache_ram_mib = options.cache_ram_mib
    params.flash_attn_type = (
        llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_AUTO
        if options.flash_attention
        else llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    params.hostnames = [options.socket_path]
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.endpoint_props = True
    params.ui = False
    params.verbosity = _VERBOSITY_ERRORS
    socket_path = Path(options.socket_path)
    socket_path.unlink(missing_ok=True)
    try:
        server = Server(params)
    except RuntimeError:  # It has said why, in its log.
        sys.exit(1)
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    sys.stdin.buffer.read()
    socket_path.unlink(missing_ok=True)
    del server


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel end this process when its parent ends, also if it just did (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def main() -> None:
    """Serve as the one argument says."""
    options, parent_pid = json.decode(sys.argv[1], type=LlamaOptions), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal is the agent's to handle.
    die_with_parent(parent_pid)
    serve(options)


if __name__ == "__main__":
    main()
