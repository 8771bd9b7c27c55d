"""The command line as people run it, in a process of its own."""

import asyncio
import os
import sys
from dataclasses import dataclass
from typing import Any

import orjson

from ops.cluster import LocalCluster


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it printed, as JSON."""
        return orjson.loads(self.out)


async def inferlane(cluster: LocalCluster, *arguments: str) -> Ended:
    """Run the command against a cluster."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ops.cli.main", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "INFERLANE_URL": cluster.url},
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())
