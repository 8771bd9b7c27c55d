"""Whatever is asked of files and batches: an answer in OpenAI's form, and nothing left over."""

import random

import orjson
import pytest

from producers.batches.config import BatchesConfig
from tests.batches import lines
from tests.builders import LANE
from tests.shops import ENDPOINT, a_shop, uploaded

REQUESTS = 150

STATUSES = {200, 400, 404, 405, 409, 413, 415}
"""No 500, and none that says that the gateway failed."""

NAMES = ("%2A", "%3E", "a.b", "batch_none", "file-none", "%00", "%ff", "x" * 300, "..", "%20", "é")

VALUES = (
    None,
    True,
    0,
    -1,
    10**18,
    "",
    "x",
    "\x00",
    "24h",
    "😀" * 600,
    [],
    {},
    [[]],
    {"a": {"b": 1}},
)

FIELDS = (
    *(
        "input_file_id",
        "endpoint",
        "completion_window",
        "metadata",
        "output_expires_after",
        "x\x00",
    ),
)

QUERIES = ("", "?limit=0", "?limit=x", "?limit=99999999999999999999", "?after=%2A", "?order=up")


def _spoiled(draw: random.Random, file_id: str) -> bytes:
    """A request for a batch with a field or two that are not right."""
    asked: dict[str, object] = {
        "input_file_id": file_id,
        "endpoint": ENDPOINT,
        "completion_window": "24h",
    }
    for _ in range(draw.randint(1, 2)):
        asked[draw.choice(FIELDS)] = draw.choice(VALUES)
    body = orjson.dumps(asked)
    return body[: draw.randrange(len(body))] if draw.random() < 0.2 else body


def _form(draw: random.Random) -> bytes:
    """A multipart body that is cut off, or has odd parts."""
    name = draw.choice(["file", "purpose", "expires_after[seconds]", "x"])
    part = f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode()
    body = part * draw.randint(1, 20) + draw.randbytes(200) + b"\r\n--b--\r\n"
    return body[: draw.randrange(len(body))] if draw.random() < 0.5 else body


@pytest.mark.filterwarnings("ignore::aiohttp.multipart.BadContentDispositionHeader")
@pytest.mark.filterwarnings("ignore::aiohttp.multipart.BadContentDispositionParam")
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_odd_requests(seed: int) -> None:
    """Each is answered, none by a surprise of ours, and a file that was there is still whole."""
    draw = random.Random(seed)
    quiet = BatchesConfig(batches_running_max=0, file_bytes_max=1000)
    async with a_shop(batches=quiet) as (client, place, front):
        kept = await uploaded(client, lines(2))

        async def ask(verb: str, path: str, **fields: object) -> None:
            async with front.session.request(verb, path, **fields) as answer:  # pyright: ignore[reportArgumentType]
                assert answer.status in STATUSES, (verb, path, fields, await answer.text())
                if answer.status != 200:
                    told = await answer.json()
                    assert set(told["error"]) == {"message", "type", "param", "code"}

        for _ in range(REQUESTS):
            base = draw.choice(["/v1/files", "/v1/batches"])
            match draw.randrange(5):
                case 0:
                    kind = {"Content-Type": "application/json"}
                    await ask("POST", "/v1/batches", data=_spoiled(draw, kept), headers=kind)
                case 1:
                    kind = {"Content-Type": "multipart/form-data; boundary=b"}
                    await ask("POST", "/v1/files", data=_form(draw), headers=kind)
                case 2:
                    await ask("GET", base + draw.choice(QUERIES))
                case 3:
                    verb = draw.choice(["GET", "DELETE", "PUT", "HEAD"])
                    if verb != "HEAD":
                        await ask(verb, f"{base}/{draw.choice(NAMES)}")
                case _:
                    tail = draw.choice(["content", "cancel", "x"])
                    verb = draw.choice(["GET", "POST"])
                    await ask(verb, f"{base}/{draw.choice(NAMES)}/{tail}")
        content = await client.files.content(kept)
        assert content.text.count("\n") == 1
        known = {info.id for info in await place.files.all()}
        counts = await place.bus.subject_counts(f"FILES_{LANE}")
        assert {subject.rpartition(".")[2] for subject in counts} <= known
        assert front.gateway.metrics.surprises._value.get() == 0
