"""What `inferlane submit` prints of an answer, streamed or not."""

from typing import Any

import orjson
import pytest

from broker.wire.messages import Tokens
from ops.cli import submit
from tests.builders import a_chat_body
from tests.lanes import a_lane
from tests.responder import ATTEMPT, a_record

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def a_choice(index: int = 0, **message: Any) -> dict[str, Any]:
    """A choice of a chat's answer."""
    return {"index": index, "message": {"role": "assistant", "content": None, **message}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "printed", "told"),
    [
        ({"choices": [a_choice(content="hi")]}, "hi\n", ""),
        ({"data": [{"embedding": [0.5]}]}, None, ""),
        ({"choices": [a_choice(tool_calls=[CALL])]}, None, ""),
        ({"choices": [a_choice(content="")]}, None, ""),
        ({"choices": [a_choice(content="hi", tool_calls=[CALL])]}, "hi\n", "1 calls of tools"),
        ({"choices": [a_choice(content="hi"), a_choice(1, content="ho")]}, "hi\n", "2 choices"),
        ({"output": [{"type": "function_call", "name": "f"}]}, None, ""),
    ],
)
async def test_an_answer_is_never_an_empty_line(
    capfdbinary: pytest.CaptureFixture[bytes],
    stream: bool,
    answer: dict[str, Any],
    printed: str | None,
    told: str,
) -> None:
    """Its text, and a word on what else it has; without a text all of it, as JSON."""
    body = orjson.dumps(answer)
    async with a_lane() as (client, responder):
        responder.answer = lambda job: a_record(job, body=body)
        ticket = await client.submit(a_chat_body(), stream=stream)
        await submit._print(ticket, stream=stream, as_json=False)
    out, err = capfdbinary.readouterr()
    assert out == (body + b"\n" if printed is None else printed.encode())
    assert err.decode() == (f"the answer has {told}; --json prints all of it\n" if told else "")


async def test_choices_that_come_interleaved(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """The text of the first one, and not both through each other."""
    pieces = [(0, "h"), (1, "x"), (0, "i")]
    answer = {"choices": [a_choice(content="hi"), a_choice(1, content="x")]}
    async with a_lane() as (client, responder):
        responder.answer = lambda job: a_record(job, body=orjson.dumps(answer))
        responder.chunks = lambda job: [
            Tokens(
                job=job.id,
                attempt=ATTEMPT,
                index=number,
                data=orjson.dumps({"choices": [{"index": index, "delta": {"content": text}}]}),
            )
            for number, (index, text) in enumerate(pieces)
        ]
        ticket = await client.submit(a_chat_body(), stream=True)
        await submit._print(ticket, stream=True, as_json=False)
    assert capfdbinary.readouterr().out == b"hi\n"
