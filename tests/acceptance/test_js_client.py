"""The public JavaScript client of NATS as a caller, in an account of its own as the page says.

It was written from `ops/docs/protocol.md` and has nothing of ours, so what it can do any NATS
client can.
"""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ops.demo.setting import ONLINE_LANE
from tests.acceptance.audit import Audit
from tests.acceptance.conftest import StartCluster
from tests.lane_accounts import PASSWORD, USER, a_server_of

CLIENT = Path(__file__).parents[1] / "clients" / "js"

needs_node = pytest.mark.skipif(
    not (shutil.which("node") and (CLIENT / "node_modules").is_dir()),
    reason="no JavaScript client: install node and npm, then run `npm ci` in tests/clients/js",
)

pytestmark = [needs_node, pytest.mark.timeout(90)]

JETSTREAM_NOT_ENABLED = 10039
"""The server's word on all of JetStream that an account does not import."""


async def run(scenario: str, start_cluster: StartCluster, folder: Path) -> dict[str, Any]:
    """Let the client do a scenario on a cluster of its own, and return what it saw."""
    cluster, bus = await start_cluster(server=a_server_of(ONLINE_LANE, folder / "nats"))
    audit = await Audit(bus).begin()
    process = await asyncio.create_subprocess_exec(
        *("node", "client.mjs", scenario, cluster.url.removeprefix("nats://")),
        *(USER, PASSWORD, ONLINE_LANE),
        cwd=CLIENT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(60):
            said, told = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, told.decode()
    await audit.until_empty(ONLINE_LANE)
    return json.loads(said)


async def test_it_submits_streams_and_reads_its_result(
    start_cluster: StartCluster, tmp_path: Path
) -> None:
    """JetStream publish, tokens as they come, the record by direct get and by question."""
    saw = await run("chat", start_cluster, tmp_path)
    assert saw["stored"]["stream"] == f"JOBS_{ONLINE_LANE}"
    assert saw["again"] == {**saw["stored"], "duplicate": True}
    assert [event["index"] for event in saw["tokens"]] == list(range(len(saw["tokens"])))
    deltas = [choice["delta"] for event in saw["tokens"] for choice in event["data"]["choices"]]
    answer = saw["record"]["body"]["choices"][0]["message"]["content"]
    assert "".join(delta.get("content") or "" for delta in deltas) == answer != ""
    assert saw["types"][-1] == "end"
    assert "started" in saw["types"]
    content_type = saw["record"].pop("content_type")
    assert content_type == "application/json"
    assert saw["record"] == saw["end"]["record"] == saw["asked"]["data"]
    assert saw["record"]["usage"]["output_tokens"] == 8
    assert saw["record"]["submitted_at_s"] > 0
    assert saw["estimate"]["data"]["queued_jobs"] == 0
    assert {(queue["band"], queue["model"]) for queue in saw["state"]["queues"]} == {
        (band, "tiny") for band in range(4)
    }


async def test_its_prompts_are_routed_to_their_caches(
    start_cluster: StartCluster, tmp_path: Path
) -> None:
    """It computes no hash: the broker does, so that equal prefixes meet on one worker."""
    ends = (await run("prefixes", start_cluster, tmp_path))["ends"]
    workers = {end["job"]: end["worker"] for end in ends}
    cached = {end["job"]: end["usage"]["cached_tokens"] for end in ends}
    assert workers["a-1"] == workers["a-2"] == workers["a-3"]
    assert workers["b-1"] == workers["b-2"]
    assert cached["a-1"] == cached["b-1"] == 0
    assert min(cached["a-2"], cached["a-3"], cached["b-2"]) > 1000


async def test_it_cancels_what_runs_and_what_waits(
    start_cluster: StartCluster, tmp_path: Path
) -> None:
    """Within a second; a job that nobody knows is told as such."""
    saw = await run("cancel", start_cluster, tmp_path)
    assert saw["running"] == saw["queued"] == {"ok": True, "message": "cancelling"}
    for end in (saw["end"], saw["other"]):
        assert (end["record"]["kind"], end["record"]["reason"]) == ("cancelled", "cancelled")
    assert saw["took_ms"] < 1000
    assert not saw["unknown"]["ok"]


async def test_it_is_refused_in_json_and_reaches_nothing_of_others(
    start_cluster: StartCluster, tmp_path: Path
) -> None:
    """Malformed jobs have their records; what its account does not import, nobody answers."""
    saw = await run("refusals", start_cluster, tmp_path)
    assert saw["told"]["record"]["reason"] == "malformed"
    assert "$.body" in saw["told"]["record"]["message"]
    assert [record["reason"] for record in saw["records"]] == ["malformed", "malformed"]
    assert {record["content_type"] for record in saw["records"]} == {"application/json"}
    assert "error" in saw["model"]
    assert "tiny in band 1" in saw["estimate"]["message"]
    assert saw["missing"] is None
    assert saw["purged"]["error"]["err_code"] == JETSTREAM_NOT_ENABLED
    for name in ("other_lane", "other_record", "forged"):
        assert "error" in saw[name], name
