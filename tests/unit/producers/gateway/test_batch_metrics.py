"""What a gateway's /metrics tell of batches."""

import asyncio

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from broker.wire.ids import is_token
from producers.gateway.batches import process_name
from tests.batches import lines
from tests.builders import LANE
from tests.gateways import Front
from tests.shops import ENDPOINT, a_shop, uploaded
from tests.stored_batches import SMALL

OFTEN = msgspec.structs.replace(SMALL, census_s=0.02)


async def told(front: Front) -> dict[tuple[str, ...], float]:
    """All samples: name and labels' values, with their numbers."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{front.url}/metrics") as answer,
    ):
        text = await answer.text()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_what_ran_and_what_there_is() -> None:
    """Lines by lane and result, batches taken and running; then the cluster's, by lane."""
    async with a_shop(batches=OFTEN) as (client, place, front):
        place.responder.may_run.clear()
        file_id = await uploaded(client, [*lines(4), b"{no json"])
        batch = await client.batches.create(
            input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h"
        )
        await place.when(batch.id, lambda one: one.place.jobs_inflight > 0)
        async with asyncio.timeout(10):
            while not (found := await told(front)).get(("inferlane_batches_open", LANE)):
                await asyncio.sleep(0.01)
        assert found["inferlane_gateway_batches_running",] == 1
        assert found["inferlane_gateway_batches_taken_total", "new"] == 1
        assert found["inferlane_gateway_batches_taken_total", "takeover"] == 0
        assert found["inferlane_batches_untaken", LANE] == 0
        assert found["inferlane_batches_late", LANE] == 0
        assert 0 < found["inferlane_batches_oldest_seconds", LANE] < 60
        assert 0 < found["inferlane_files_bytes", LANE] < found["inferlane_files_bytes_max", LANE]
        place.responder.may_run.set()
        await place.ended(batch.id)
        async with asyncio.timeout(10):
            while (found := await told(front))["inferlane_batches_open", LANE]:
                await asyncio.sleep(0.01)
        assert found["inferlane_gateway_batch_lines_total", LANE, "completed"] == 4
        assert found["inferlane_gateway_batch_lines_total", LANE, "failed"] == 1
        assert found["inferlane_gateway_batch_faults_total",] == 0


def test_a_lease_names_the_process() -> None:
    """Whatever its host is called, the name is a token."""
    assert process_name("gpu1.example.com", 77) == "gpu1-example-com-77"
    assert is_token(process_name("ä" * 300, 2**22))


async def test_old_figures_are_not_told_as_new_ones() -> None:
    """While the server can't be reached there are none of the cluster's."""
    async with a_shop(batches=OFTEN) as (_, place, front):
        async with asyncio.timeout(10):
            while ("inferlane_files_bytes", LANE) not in await told(front):
                await asyncio.sleep(0.01)
        place.bus.disconnect()
        async with asyncio.timeout(10):
            while ("inferlane_files_bytes", LANE) in await told(front):
                await asyncio.sleep(0.01)
        place.bus.reconnect()
