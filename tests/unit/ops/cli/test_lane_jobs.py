"""`job` and `cancel`: which job is meant, what people read, what scripts read."""

import orjson
import pytest

from broker.wire.messages import Kind, LaneOffer, Reason, TerminalRecord, Usage
from ops.cli import cancel
from ops.cli.errors import Misused
from ops.cli.job import as_builtins, as_text
from ops.cli.lane_jobs import only_lane, split_job
from ops.cli.main import main
from producers.looking import JobLook
from producers.ticket import TicketState


def test_a_job_is_named_alone_or_with_its_lane() -> None:
    """Once; a contradiction, or what can't be an id, is misuse."""
    assert split_job("abc", None) == (None, "abc")
    assert split_job("abc", "acme") == ("acme", "abc")
    assert split_job("acme.abc", None) == split_job("acme.abc", "acme") == ("acme", "abc")
    for job, lane in (("acme.abc", "beta"), ("a b", None), ("", "acme"), ("x", "no lane")):
        with pytest.raises(Misused):
            split_job(job, lane)


def test_the_only_lane_needs_no_naming() -> None:
    """Of several, or none, one has to be named."""
    assert only_lane(["acme"]) == "acme"
    for lanes in ([], ["acme", "beta"]):
        with pytest.raises(Misused, match="--lane"):
            only_lane(lanes)


def test_a_waiting_job_in_words() -> None:
    """Its place, its wait, and what it waits for."""
    look = JobLook("j", TicketState.QUEUED, position=1200, wait_s=90.0, held_by="quota")
    assert as_text(look, "acme").split("\n") == [
        "acme.j: queued",
        "1,200 jobs before it, about 1 min 30 s to wait",
        "waits for: quota",
    ]
    unknown = JobLook("j", TicketState.QUEUED)
    assert as_text(unknown, "acme") == "acme.j: queued"


def test_an_ended_job_in_words_and_json() -> None:
    """Kind, tokens, and the answer's text; the answer itself for scripts."""
    body = orjson.dumps({"choices": [{"message": {"content": "Hi\x1b[31m"}}]})
    record = TerminalRecord(
        job="j",
        lane="acme",
        kind=Kind.COMPLETED,
        ended_at_s=1.0,
        body=body,
        usage=Usage(1200, 800, 3),
        worker="w1",
    )
    look = JobLook("j", TicketState.ENDED, wait_s=0.0, worker="w1", record=record)
    assert as_text(look, "acme").split("\n")[1:] == [
        "worker: w1",
        "completed",
        "tokens: 1,200 in (800 cached), 3 out",
        "Hi�[31m",
    ]
    told = orjson.loads(orjson.dumps(as_builtins(look, "acme")))
    assert told["record"]["usage"]["cached_tokens"] == 800
    assert told["record"]["body"]["choices"][0]["message"]["content"] == "Hi\x1b[31m"


def test_a_failed_job_says_why() -> None:
    """The record's own words, or the engine's where it is no JSON."""
    record = TerminalRecord(
        job="j",
        lane="acme",
        kind=Kind.FAILED,
        ended_at_s=1.0,
        reason=Reason.ENGINE_REFUSED,
        message="too long",
        body=b"<html>",
    )
    look = JobLook("j", TicketState.ENDED, record=record)
    assert as_text(look, "acme").split("\n")[1::2] == ["failed (engine_refused)", "too long"]
    assert as_builtins(look, "acme")["record"]["body"] == "<html>"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--lane"),
        (("j", "--band", "1"), "not both"),
        (("acme.j", "--lane", "beta"), "name one"),
    ],
)
def test_misuse_of_cancel_is_told(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is asked of a cluster."""
    assert main(["cancel", *arguments]) == 2
    assert says in capsys.readouterr().err


class _Offered:
    """A client as far as its offer goes."""

    lane = "acme"
    offer = LaneOffer(lane="acme", models=("tiny",), bands=(1, 2))


def test_a_wrong_model_or_band_is_a_typing_error() -> None:
    """And not a lane without such jobs."""
    for which in ({"model": "tyni", "bands": ()}, {"model": "", "bands": (3,)}):
        with pytest.raises(Misused, match=r"tiny|it has: 1, 2"):
            cancel._check(_Offered(), which)  # pyright: ignore[reportArgumentType]
    cancel._check(_Offered(), {"model": "tiny", "bands": (1,)})  # pyright: ignore[reportArgumentType]
