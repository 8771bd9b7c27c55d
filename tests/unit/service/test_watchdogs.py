"""Watchdogs: each trouble is seen, alarmed once, told for a minute more, and over."""

from collections import Counter
from pathlib import Path

from broker.bus.memory import MemoryBus
from broker.bus.memory_clock import ManualClock
from broker.service.decision_log import DecisionLog
from broker.service.main import Broker
from broker.service.metrics import Metrics
from broker.service.watchdogs import ALARM_S, STORE_SLOW_S, Watchdogs, cut, full, risen, slow
from ops.cli.doctor_judge import TO_DO
from tests.leaders import a_config

PAGE = Path("ops/docs/watchdogs.md")


def test_an_alarm_stands_for_a_minute_after_its_trouble_and_counts_once() -> None:
    """Whoever scrapes each quarter of a minute must see it."""
    clock, troubles = ManualClock(), ["", "bad", "worse", "", "", "again"]
    dogs = Watchdogs({"one": lambda: troubles.pop(0)}, now=clock.now_s)
    seen: list[tuple[str, int]] = []
    for passed_s in (0.0, 1.0, 1.0, ALARM_S - 0.1, 0.1, 1.0):
        clock.advance(passed_s)
        dogs.look()
        (view,) = dogs.views()
        seen.append((view.trouble, view.alarms))
    assert seen == [("", 0), ("bad", 1), ("worse", 1), ("worse", 1), ("", 1), ("again", 2)]


def test_a_count_is_told_when_it_rises_and_not_for_what_was_before() -> None:
    """A stalled consumer, say."""
    counts = Counter({"pulls_stalled": 3})
    look = risen(counts, "pulls_stalled", "stalled")
    assert look() == ""
    counts["pulls_stalled"] += 1
    assert look() == "stalled (4 times since the start)"
    assert look() == ""


async def test_a_link_is_told_while_it_is_down_and_once_when_it_was_lost() -> None:
    """Also one that was back before the next look."""
    bus = MemoryBus()
    link = bus.connection()
    look = cut(link)
    assert look() == ""
    link.disconnect()
    assert "no link" in look()
    assert "no link" in look()
    link.reconnect()
    assert look() == ""
    link.counts["links_lost"] += 1
    assert "was lost" in look()
    assert look() == ""
    await bus.close()


def test_a_slow_store_is_one_that_needs_longer_than_its_bound() -> None:
    """STORE_SLOW_S for one small write."""
    taken = [STORE_SLOW_S, STORE_SLOW_S + 0.1]
    look = slow(lambda: taken.pop(0))
    assert look() == ""
    assert look() == "a write took 0.6 s"
    assert slow(lambda: 0.0, stuck=lambda: "it stores nothing")() == "it stores nothing"


def test_full_results_name_their_lanes() -> None:
    """And nobody, where all have room."""
    lanes: list[tuple[str, ...]] = [(), ("a", "b")]
    look = full(lambda: lanes.pop(0))
    assert look() == ""
    assert look() == "results have no more room in a, b"


async def test_every_watchdog_is_explained_where_people_look(tmp_path: Path) -> None:
    """`ops/docs/watchdogs.md` has a row for each, `doctor` something to do."""
    bus = MemoryBus()
    log = DecisionLog(tmp_path, file_bytes_max=0, files_max=1)
    broker = Broker(bus, a_config(), metrics=Metrics(lanes=[], models=[]), log=log)
    names = [view.name for view in broker.watchdogs.views()]
    rows = [line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if "| `" in line]
    assert [f"`{name}`" for name in names] == [row for row in rows if row.startswith("`")]
    assert list(TO_DO) == names
    await bus.close()
