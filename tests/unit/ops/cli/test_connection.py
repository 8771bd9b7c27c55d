"""One request to the broker: its answer, its words when it refuses, what to do without one."""

from pathlib import Path

import pytest

from broker.bus.base import Message
from broker.bus.memory import MemoryBus
from broker.wire import subjects
from broker.wire.control import ControlReply
from ops.cli.connection import Cluster, ask, connected
from ops.cli.errors import CommandError, Unreachable
from ops.cli.main import main
from tests.operators import Operator


async def test_answer() -> None:
    """The data of the reply."""
    bus = MemoryBus()
    async with Operator(bus) as operator:
        operator.answers["status"] = lambda: ControlReply(ok=True, data=b"{}")
        assert await ask(bus, "status") == b"{}"


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (ControlReply(ok=False, message="No worker x."), "No worker x."),
        (ControlReply(ok=False), "the broker refused without saying why"),
    ],
)
async def test_refusal(reply: ControlReply, told: str) -> None:
    """The broker's words are the error."""
    bus = MemoryBus()
    async with Operator(bus) as operator:
        operator.answers["status"] = lambda: reply
        with pytest.raises(CommandError) as caught:
            await ask(bus, "status")
    assert (str(caught.value), caught.value.code) == (told, 1)


async def test_nobody_leads() -> None:
    """Says how to start a broker."""
    with pytest.raises(Unreachable, match=r"no broker leads: start one with `inferlane broker"):
        await ask(MemoryBus(), "status")


async def test_no_answer() -> None:
    """A broker that hangs is not waited for."""
    bus = MemoryBus()
    await bus.subscribe(subjects.CLUSTER_CONTROL, lambda _: None)
    with pytest.raises(Unreachable, match=r"did not answer within 0.01 s"):
        await ask(bus, "status", timeout_s=0.01)


async def test_answer_that_is_none() -> None:
    """Bytes that are no reply are no surprise."""
    bus = MemoryBus()

    async def garbage(message: Message) -> None:
        await bus.publish(message.reply, b"\xff")

    await bus.subscribe(subjects.CLUSTER_CONTROL, garbage)
    with pytest.raises(CommandError, match=r"can't be read .* another version"):
        await ask(bus, "status")


BAD_LINKS = (
    (["--url", "http://h:1"], "not a NATS URL"),
    (["--url", "nats://h:99999"], "not a NATS URL"),
    (["--creds", "x" * 300], "can't be read: file name too long"),
    (["--creds", "absent.creds"], "no credentials file absent.creds"),
)

COMMANDS = (
    "workers",
    "batch list --lane a",
    "batch check {} --lane a",
    "batch run {} --lane a --output {}.out",
    "submit hello --lane a",
    "cancel a.b",
)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("flags", "said"), BAD_LINKS)
def test_a_link_that_can_not_be(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, flags: list[str], said: str
) -> None:
    """Wrong usage, and no server that is away: whoever tries code 3 again would do so for ever."""
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"{}\n")
    code = main([*command.replace("{}", str(source)).split(), *flags])
    told = capsys.readouterr().err
    assert (code, said in told) == (2, True), told
    assert "start" not in told
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


async def test_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says where it looked, without the password, and how to say otherwise."""
    monkeypatch.setattr("ops.cli.connection.CONNECT_S_MAX", 0.1)
    cluster = Cluster(url="nats://u:hunter2@127.0.0.1:1")
    with pytest.raises(Unreachable, match=r"127.0.0.1:1.*--url or INFERLANE_URL") as caught:
        async with connected(cluster):
            pass
    assert "hunter2" not in str(caught.value)
