"""An upload larger than 4 GiB through a gateway of its own, with what ships: time and memory.

    python -m tests.bench.large_upload --bytes 4400000000

The body is made as it is sent, by a seed, and what is read back is compared by its hash. Also: an
upload that says it is too large, and how long its refusal takes.
"""

import argparse
import asyncio
import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import orjson
import xxhash

from broker.bus import topology
from broker.bus.nats import connect
from broker.bus.topology import Bounds, LanePlan
from broker.wire.codec import encode
from broker.wire.messages import LaneOffer
from ops.nats.server import NatsServer

LANE, KEY = "main", "sk-bench"
PIECE_BYTES = 1 << 20
HEAD = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
)
TAIL = b"\r\n--b--\r\n"
CONFIG = """
[nats]
url = "{url}"
[gateway]
port = 0
[gateway.keys.bench]
lane = "main"
key = "sk-bench"
"""


def piece(number: int) -> bytes:
    """A megabyte that no other number gives: lines of hex, so that it is text."""
    line = hashlib.sha256(b"%d" % number).hexdigest().encode()[:63] + b"\n"
    return line * (PIECE_BYTES // len(line))


async def body(pieces: int, digest: xxhash.xxh3_128) -> AsyncIterator[bytes]:
    """The multipart body of a file of so many megabytes."""
    yield HEAD
    for number in range(pieces):
        data = piece(number)
        digest.update(data)
        yield data
    yield TAIL


def memory_mb(pid: int, name: str) -> float:
    """A figure of a process's memory in MB: VmHWM, VmRSS."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1000
    message = f"no {name} of {pid}"
    raise ValueError(message)


async def upload(session: aiohttp.ClientSession, size: int, pieces: int) -> tuple[int, bytes, str]:
    """Send a file of `size` bytes in pieces; return status, answer and hash of what was sent."""
    digest = xxhash.xxh3_128()
    headers = {
        "Content-Type": "multipart/form-data; boundary=b",
        "Content-Length": str(len(HEAD) + size + len(TAIL)),
    }
    async with session.post("/v1/files", data=body(pieces, digest), headers=headers) as answer:
        return answer.status, await answer.read(), digest.hexdigest()


async def refused(url: str, size: int) -> tuple[float, bytes]:
    """Say that a file of so many bytes comes, send its first, and wait for the answer."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    began_s = time.monotonic()
    writer.write(
        f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: "
        f"multipart/form-data; boundary=b\r\nContent-Length: {size}\r\n\r\n".encode()
        + HEAD
    )
    await reader.readuntil(b"\r\n\r\n")
    answer = await reader.readuntil(b"}}")
    writer.close()
    return time.monotonic() - began_s, answer


async def set_up(url: str) -> None:
    """One lane, as it ships."""
    bus = await connect(url, name="bench")
    await topology.apply(bus, topology.of([LanePlan(LANE, ("tiny",))], Bounds()))
    offer = LaneOffer(lane=LANE, models=("tiny",))
    await bus.kv_put("CONFIG", f"lane.{LANE}", encode(offer))
    await bus.close()


async def measure(server: NatsServer, folder: Path, size: int) -> None:
    """Send, read back, and tell."""
    await set_up(server.url)
    path = folder / "inferlane.toml"
    path.write_text(CONFIG.format(url=server.url))
    command = [sys.executable, "-m", "ops.cli.main", "gateway", "--config", str(path)]
    gateway = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert gateway.stdout is not None
        url = orjson.loads(await asyncio.to_thread(gateway.stdout.readline))["http"]
        before_mb = memory_mb(gateway.pid, "VmHWM")
        none = aiohttp.ClientTimeout(total=None)
        auth = {"Authorization": f"Bearer {KEY}"}
        async with aiohttp.ClientSession(url, headers=auth, timeout=none) as session:
            pieces = size // PIECE_BYTES
            began_s = time.monotonic()
            status, answer, sent = await upload(session, pieces * PIECE_BYTES, pieces)
            took_s = time.monotonic() - began_s
            print(f"{pieces * PIECE_BYTES:,} bytes: {status} in {took_s:.0f} s, {answer.decode()}")
            print(f"gateway VmHWM {before_mb:.0f} -> {memory_mb(gateway.pid, 'VmHWM'):.0f} MB")
            file_id = orjson.loads(answer)["id"]
            digest = xxhash.xxh3_128()
            began_s = time.monotonic()
            async with session.get(f"/v1/files/{file_id}/content") as content:
                async for data in content.content.iter_chunked(PIECE_BYTES):
                    digest.update(data)
            took_s = time.monotonic() - began_s
            print(f"read back in {took_s:.0f} s, the same: {digest.hexdigest() == sent}")
            print(f"gateway VmHWM {memory_mb(gateway.pid, 'VmHWM'):.0f} MB")
        took_s, answer = await refused(url, 9_000_000_000)
        print(f"9 GB are refused after {took_s * 1000:.0f} ms: {answer.decode()}")
    finally:
        gateway.terminate()
        gateway.wait()


def main() -> None:
    """Run it in a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=4_400_000_000)
    size = parser.parse_args().bytes
    with tempfile.TemporaryDirectory(prefix="large-upload-") as folder:
        free = shutil.disk_usage(folder).free
        assert free > 3 * size, f"{free:,} bytes are free, and this needs {3 * size:,}"
        with NatsServer(Path(folder) / "nats") as server:
            asyncio.run(measure(server, Path(folder), size))


if __name__ == "__main__":
    main()
