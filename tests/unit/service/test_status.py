"""The broker over HTTP: health, readiness, metrics, the page, and nothing more."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from broker.service.metrics import Metrics
from broker.service.snapshot import RowView, SnapshotSource, WatchView
from broker.service.status import (
    HEADER_BYTES_MAX,
    HEADERS_MAX,
    RENDERS_MAX,
    STALL_S,
    Health,
    PageUnavailable,
    StatusServer,
)
from broker.service.status_page import NOTICES_MAX, ROWS_MAX, page
from tests.views import (
    Cluster,
    a_gone_view,
    a_lane_view,
    a_queue_view,
    a_status_view,
    a_worker_view,
)

LEADER = Health(role="leader", ready=True, reason="", epoch=7)


@asynccontextmanager
async def a_server(
    health: Health = LEADER, source: SnapshotSource | None = None
) -> AsyncGenerator[aiohttp.ClientSession]:
    """A status server on a free port, and a session that speaks to it."""
    source = source or Cluster()
    metrics = Metrics(lanes=["acme"], models=["tiny"])
    metrics.attach(source)
    server = StatusServer(metrics, source, health=lambda: health)
    url = await server.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(url) as session:
            yield session
    finally:
        await server.stop()


async def _get(session: aiohttp.ClientSession, path: str) -> tuple[int, str]:
    async with session.get(path) as answer:
        return answer.status, await answer.text()


@pytest.mark.parametrize(
    ("health", "status", "told"),
    [
        (LEADER, 200, '{"ready":true,"role":"leader","epoch":7,"reason":""}\n'),
        (
            Health(role="standby", ready=True, reason="broker-1 leads"),
            200,
            '{"ready":true,"role":"standby","epoch":0,"reason":"broker-1 leads"}\n',
        ),
        (
            Health(role="starting", ready=False, reason="no link to nats://x"),
            503,
            '{"ready":false,"role":"starting","epoch":0,"reason":"no link to nats://x"}\n',
        ),
    ],
)
async def test_readiness(health: Health, status: int, told: str) -> None:
    """A leader and a standby are ready; otherwise the reason is told."""
    async with a_server(health) as session:
        assert await _get(session, "/readyz") == (status, told)


@pytest.mark.parametrize(("ago_s", "status"), [(0.0, 200), (STALL_S, 200), (STALL_S + 0.1, 503)])
async def test_health(ago_s: float, status: int) -> None:
    """A process whose loop has not turned for five seconds is not alive."""
    health = Health(role="leader", ready=True, reason="", turned_ago_s=ago_s)
    async with a_server(health) as session:
        answer = await _get(session, "/healthz")
    assert answer[0] == status
    assert ("the loop has not turned for 5.1 s" in answer[1]) == (status == 503)


async def test_metrics_are_served() -> None:
    """As Prometheus's text format, by its content type."""
    async with a_server() as session, session.get("/metrics") as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert 'inferlane_worker_up{worker="gpu-1"} 1.0\n' in await answer.text()


async def test_page_of_a_leader() -> None:
    """Workers, queues and rows, all in one answer that needs no other."""
    async with a_server() as session, session.get("/") as answer:
        text = await answer.text()
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
    for told in (
        "inferlane broker: leader",
        "gpu-1",
        "acme",
        "tiny",
        "band=1",
        "75%",
        "1.5 s",
        "1 h 2 min",
    ):
        assert told in text
    assert "src=" not in text
    assert "<script" not in text
    assert 'http-equiv="refresh"' in text


async def test_page_tells_what_its_quotas_bound() -> None:
    """Each row's use beside its bound, a dash where it has none; nothing that no row bounds."""
    rows = (
        RowView(row="a", inflight_jobs=1, queued_jobs=12, queued_jobs_max=400),
        RowView(row="b", inflight_jobs=0, bucket_tokens=-1500.0, tokens_per_min=2_000_000),
    )
    text = await page(Cluster(lanes=[a_lane_view(rows=rows)]), role="leader", reason="")
    heads = "<th>waiting</th><th>of</th><th>may start</th><th>a minute</th></tr>"
    assert f"<th>borrowed</th>{heads}" in text
    assert "<td>12</td><td>400</td><td>–</td><td>–</td></tr>" in text
    assert "<td>–</td><td>–</td><td>-1,500</td><td>2,000,000</td></tr>" in text


async def test_page_of_a_standby() -> None:
    """It says that the leader's page has what one looks for."""
    health = Health(role="standby", ready=True, reason="broker-1 leads")
    source = Cluster(lanes=[], workers=[], status=a_status_view(leader=False, since_s=0.0))
    async with a_server(health, source) as session:
        status, text = await _get(session, "/")
    assert status == 200
    assert "standby (broker-1 leads)" in text
    assert "This broker stands by" in text


async def test_page_without_a_ready_worker() -> None:
    """The reason why nothing runs stands on top, with what to do."""
    source = Cluster(workers=[a_worker_view(ready=False)])
    async with a_server(source=source) as session:
        _, text = await _get(session, "/")
    assert "No worker is ready: jobs wait." in text
    assert "not ready" in text


async def test_page_tells_who_went() -> None:
    """A worker that was lost and is not back stands out; its name may be anything."""
    gone = (a_gone_view(worker="<gpu>"), a_gone_view(worker="b", back=True))
    text = await page(Cluster(gone=gone), role="leader", reason="")
    assert "Went of late" in text
    assert '&lt;gpu&gt;</td><td class="t bad">lost</td><td>5 min 0 s ago</td>' in text
    assert 'b</td><td class="t">lost, back</td>' in text
    assert "Went of late" not in await page(Cluster(), role="leader", reason="")


async def test_page_names_a_worker_whose_breaker_is_open() -> None:
    """In red, as whatever needs a look."""
    async with a_server(source=Cluster(workers=[a_worker_view(breaker="open")])) as session:
        _, text = await _get(session, "/")
    assert '<td class="t bad">breaker open</td>' in text


async def test_page_says_what_is_wrong_beneath() -> None:
    """Each watchdog's trouble, and each worker's notice, before all tables."""
    watches = (WatchView(name="link"), WatchView(name="results", trouble="no room in <a>"))
    workers = [a_worker_view(notice="3 acks not confirmed")]
    source = Cluster(status=a_status_view(watches=watches), workers=workers)
    async with a_server(source=source) as session:
        _, text = await _get(session, "/")
    assert '<p class="bad">results: no room in &lt;a&gt;</p>' in text
    assert '<p class="bad">gpu-1: 3 acks not confirmed</p>' in text
    assert '"bad">link' not in text


async def test_page_shows_no_more_notices_than_its_bound() -> None:
    """Where more have one, it is the same."""
    workers = [
        a_worker_view(worker=f"w{number}", notice="full") for number in range(NOTICES_MAX + 1)
    ]
    async with a_server(source=Cluster(workers=workers)) as session:
        _, text = await _get(session, "/")
    assert text.count(": full</p>") == NOTICES_MAX


async def test_names_on_the_page_are_escaped() -> None:
    """A model's or worker's name is text, whatever it looks like."""
    bad = "<script>alert('x')</script>"
    lane = a_lane_view(queues=(a_queue_view(model=bad),))
    source = Cluster(lanes=[lane], workers=[a_worker_view(worker=bad, models=(bad,), phase=bad)])
    async with a_server(Health(role="leader", ready=True, reason=bad), source) as session:
        _, text = await _get(session, "/")
    assert "<script" not in text
    assert text.count("&lt;script&gt;") == 5


async def test_tables_past_their_bound() -> None:
    """The page shows so many lines, fullest queues first, and says how many more there are."""
    queues = tuple(
        a_queue_view(model=f"m{number}", queued_jobs=number) for number in range(ROWS_MAX + 2)
    )
    workers = [a_worker_view(worker=f"w{number:03}") for number in range(ROWS_MAX + 1)]
    source = Cluster(lanes=[a_lane_view(queues=queues)], workers=workers)
    async with a_server(source=source) as session:
        _, text = await _get(session, "/")
    assert "and 1 more" in text
    assert "and 2 more" in text
    assert f">m{ROWS_MAX + 1}<" in text
    assert ">m1<" not in text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
async def test_only_reading_is_offered(method: str) -> None:
    """Nothing can be changed here."""
    async with a_server() as session, session.request(method, "/") as answer:
        assert answer.status == 405


async def test_other_paths() -> None:
    """There is nothing else."""
    async with a_server() as session:
        assert (await _get(session, "/etc/passwd"))[0] == 404


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Long": "x" * (HEADER_BYTES_MAX + 1)},
        {f"X-{number}": "x" for number in range(HEADERS_MAX + 1)},
    ],
)
async def test_headers_past_their_bounds(headers: dict[str, str]) -> None:
    """Refused, and the server serves on."""
    async with a_server() as session:
        async with session.get("/healthz", headers=headers) as answer:
            assert answer.status == 400
        assert (await _get(session, "/healthz"))[0] == 200


async def test_renders_past_their_bound() -> None:
    """More pages at once than the bound are told to come back; health is answered all the same."""
    gate = asyncio.Event()
    entered = asyncio.Semaphore(0)

    class Slow(Metrics):
        async def expose(self) -> bytes:
            entered.release()
            await gate.wait()
            return b"# done\n"

    source = Cluster()
    server = StatusServer(Slow(), source, health=lambda: LEADER)
    url = await server.start("127.0.0.1", 0)
    async with aiohttp.ClientSession(url) as session, asyncio.TaskGroup() as group:
        scrapes = [group.create_task(_get(session, "/metrics")) for _ in range(RENDERS_MAX)]
        for _ in scrapes:
            await entered.acquire()
        assert await _get(session, "/metrics") == (
            503,
            "too many pages at once; try again in a second\n",
        )
        assert (await _get(session, "/healthz"))[0] == 200
        gate.set()
    assert [scrape.result() for scrape in scrapes] == [(200, "# done\n")] * RENDERS_MAX
    async with aiohttp.ClientSession(url) as session:
        assert (await _get(session, "/metrics"))[0] == 200
    await server.stop()


async def test_port_that_is_taken() -> None:
    """The address is told, and which keys to set."""
    async with a_server() as session:
        taken = StatusServer(Metrics(), Cluster(), health=lambda: LEADER)
        url = session._base_url
        assert url is not None
        with pytest.raises(PageUnavailable, match=r"address already in use.*broker.http_port"):
            await taken.start("127.0.0.1", url.port or 0)


async def test_host_that_is_none() -> None:
    """A host name that leads nowhere is told the same way."""
    server = StatusServer(Metrics(), Cluster(), health=lambda: LEADER)
    with pytest.raises(PageUnavailable, match=r"can't serve the status page on 203.0.113.1:0"):
        await server.start("203.0.113.1", 0)


async def test_large_page_gives_the_loop_its_turn() -> None:
    """With 2,000 workers the page is made in slices, the loop turning in between."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    workers = [a_worker_view(worker=f"w{number:04}") for number in range(2000)]
    counting = asyncio.ensure_future(count())
    await page(Cluster(workers=workers), role="leader", reason="")
    counting.cancel()
    assert turns >= 20
