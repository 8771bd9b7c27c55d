"""The README's curl examples do what it says, run as they stand against a real cluster."""

import asyncio
import re
import shutil
from pathlib import Path

import orjson
import pytest

from tests.acceptance.conftest import StartCluster
from tests.acceptance.test_gateway import a_door

README = Path("README.md")
WRITTEN_URL = "http://127.0.0.1:9471"


def _commands() -> list[str]:
    """The commands of the section on HTTP, each whole."""
    section = README.read_text().partition("### Over HTTP")[2]
    block = section.partition("```sh\n")[2].partition("```")[0]
    joined = re.sub(r"\\\n\s*", "", block)
    return [line for line in joined.splitlines() if line and not line.startswith("#")]


async def _run(command: str, url: str) -> str:
    process = await asyncio.create_subprocess_shell(
        command.replace(WRITTEN_URL, url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert (process.returncode, err) == (0, b""), err
    return out.decode()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl_examples(start_cluster: StartCluster) -> None:
    """Models, an answer, a stream, a job that is fetched later."""
    models, whole, stream, later, job = _commands()
    async with a_door(start_cluster) as door:
        url = door.base_url.removesuffix("/v1")
        assert orjson.loads(await _run(models, url))["data"][0]["id"] == "tiny"
        answer = orjson.loads(await _run(whole, url))
        assert answer["choices"][0]["message"]["content"]
        assert (await _run(stream, url)).rstrip().endswith("data: [DONE]")
        assert orjson.loads(await _run(later, url))["id"] == "my-job-1"
        async with asyncio.timeout(10):
            while (told := orjson.loads(await _run(job, url)))["status"] != "completed":
                assert told["status"] in ("queued", "running")
        assert told["response"]["body"]["choices"]
