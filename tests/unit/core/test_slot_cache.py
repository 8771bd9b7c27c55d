"""Engines that cache one sequence a slot: what is in use serves nobody else."""

import random
from collections.abc import Sequence

import pytest

from broker.core.seat import Seat
from broker.core.slot_cache import SLOTS_MAX, SlotCache
from broker.core.state import Lease
from broker.wire.messages import Attempt
from tests.unit.core.routing_builders import SYSTEM, Place, a_spec, a_worker, chain
from worker_agent.cache_stores import SequenceCache

PROMPTS = [chain((f"prompt{number}", 6)) for number in range(5)]


def a_lease(name: str, blocks: list[int]) -> Lease:
    """A lease of a job with this chain."""
    return Lease(
        a_spec(name, blocks=blocks),
        Attempt(1, 1),
        "w0",
        1,
        granted_at_s=0.0,
        cost_tokens=1.0,
        uncached_tokens=1,
        hit_tokens=0,
        output_tokens_expected=1,
    )


class Slots:
    """A slot cache under test, and the agent's own account of the same engine."""

    def __init__(self, count: int) -> None:
        self.cache = SlotCache(count)
        self.engine = SequenceCache(slots=count)
        self.leases: dict[str, Lease] = {}
        self.jobs = 0

    def begin(self, blocks: list[int], *, depth_blocks: int = 0) -> Lease:
        """Dispatch a job."""
        self.jobs += 1
        lease = a_lease(f"j{self.jobs}", blocks)
        self.leases[lease.job.key] = lease
        self.gone = list(self.cache.begin(lease, depth_blocks=depth_blocks))
        self.engine.begin(lease.job.key, blocks, at_s=self.jobs)
        return lease

    def end(self, lease: Lease, *, prefilled: bool = True) -> None:
        """End it."""
        self.jobs += 1
        lease.prefilled = prefilled
        del self.leases[lease.job.key]
        if prefilled:
            self.engine.fill(lease.job.key, at_s=self.jobs)
        self.engine.end(lease.job.key, tail_blocks=0, at_s=self.jobs)
        self.cache.settle(self.leases)

    def run(self, *blocks: int) -> None:
        """Dispatch a job and see it through."""
        self.end(self.begin(list(blocks)))


def test_a_sequence_in_use_is_nobody_elses() -> None:
    """Nor is it lost: the next one finds it."""
    slots = Slots(2)
    slots.run(1, 2, 3)
    slots.run(7, 8, 9)
    assert slots.cache.reusable_blocks([1, 2, 4]) == 2
    running = slots.begin([1, 2, 5])
    assert slots.gone == [3]
    assert slots.cache.reusable_blocks([1, 2, 4]) == 0
    slots.end(running)
    assert slots.cache.reusable_blocks([1, 2, 5, 6]) == 3


def test_a_prompt_that_is_found_nowhere_takes_the_slot_idle_for_longest() -> None:
    """What that slot held is gone at once, but for what another slot holds too."""
    slots = Slots(2)
    slots.run(1, 2, 3)
    other = slots.begin([1, 2, 4])
    slots.begin([1, 2, 5, 6])
    slots.end(other)
    slots.begin([7])
    assert slots.gone == [4]


def test_a_job_cut_short_in_its_prefill_leaves_what_was_there() -> None:
    """How far it came is not known: too little credit is told by the worker, too much is not."""
    slots = Slots(1)
    slots.run(1, 2, 3)
    slots.end(slots.begin([1, 2, 4, 5]), prefilled=False)
    assert slots.cache.reusable_blocks([1, 2, 4, 5]) == 2


def test_what_slots_held_before_is_taken_as_credited() -> None:
    """A new leader knows reports only, until each slot was used once."""
    slots = Slots(2)
    assert slots.cache.reusable_blocks([1, 2, 3]) is None
    running = slots.begin([1, 2, 3], depth_blocks=2)
    assert slots.gone == []
    assert slots.cache.reusable_blocks([1, 2, 3]) == 0
    assert slots.cache.reusable_blocks([7, 8]) is None
    slots.end(running)
    assert slots.cache.reusable_blocks([1, 2, 3]) == 3
    slots.begin([7, 8], depth_blocks=2)
    assert slots.cache.reusable_blocks([1, 2, 3]) == 3


def test_reports_stand_above_what_was_worked_out() -> None:
    """Blocks told as gone are gone; a full report leaves nothing of idle slots."""
    slots = Slots(2)
    slots.run(1, 2, 3)
    slots.run(4, 5, 6)
    slots.cache.lost([3, 2, 9])
    assert slots.cache.reusable_blocks([1, 2, 3]) == 1
    assert slots.cache.reusable_blocks([4, 5, 6]) == 3
    slots.cache.unknow()
    assert slots.cache.reusable_blocks([4, 5, 6]) is None


def test_more_jobs_than_slots_wait_in_the_engine() -> None:
    """The broker gave one too many: it changes nothing."""
    slots = Slots(1)
    slots.begin([1])
    slots.begin([2])
    assert slots.gone == []
    assert slots.cache.reusable_blocks([1]) == 0


def test_slots_are_bounded() -> None:
    """Whatever a worker says: SLOTS_MAX are followed."""
    assert len(SlotCache(10 * SLOTS_MAX)._slots) == SLOTS_MAX


@pytest.mark.parametrize("seed", range(20))
def test_it_agrees_with_the_agents_account_of_the_engine(seed: int) -> None:
    """The same slots taken, whatever comes and ends in whatever order."""
    rng, slots = random.Random(seed), Slots(4)
    for number in range(4):
        slots.run(-1 - number)  # From here on both know all slots.
    running: list[Lease] = []
    for number in range(200):
        if running and (len(running) == 4 or rng.random() < 0.5):
            slots.end(running.pop(rng.randrange(len(running))))
        else:
            blocks = rng.choice(PROMPTS)[: rng.randint(1, 6)]
            running.append(slots.begin([*blocks, 1000 + number][: rng.randint(1, 7)]))
        for prompt in PROMPTS:
            idle = [slot.chain for slot in slots.engine._slots if slot.name is None]
            expected = max((_common(held, prompt) for held in idle), default=0)
            assert slots.cache.reusable_blocks(prompt) == expected


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    shorter = min(len(left), len(right))
    return next((at for at, (one, other) in enumerate(pairs) if one != other), shorter)


def a_place(*, sequences: int = 2) -> Place:
    """Two workers with engines that cache by slot, each having seen as many prompts as slots."""
    workers = [
        a_worker(f"w{index}", index=index, slots=sequences, cache_sequences=sequences)
        for index in range(2)
    ]
    place = Place(workers)
    for worker in ("w0", "w1"):
        for number in range(sequences):
            place.run(place.spec((f"{worker}.{number}", 20)), worker)
    return place


def test_a_prefix_in_use_is_not_predicted() -> None:
    """The second of two at once is computed anew; once the first ends, the third finds it."""
    place = a_place()
    place.run(place.spec(SYSTEM), "w0")
    first = place.give(place.spec(SYSTEM, ("a", 1)))
    assert (first.worker, first.hit_tokens) == ("w0", 30 * 64)
    place.prefill(first)
    assert place.place(place.spec(SYSTEM, ("b", 1))).hit_tokens == 0
    place.end(first)
    third = place.place(place.spec(SYSTEM, ("c", 1)))
    assert third.worker is not None
    assert (third.worker.id, third.hit_tokens) == ("w0", 30 * 64)


def test_a_job_that_waits_sees_the_prefix_come_free() -> None:
    """Its kept answer falls with the end of the job that used it."""
    place = a_place()
    place.run(place.spec(SYSTEM), "w0")
    running = place.give(place.spec(SYSTEM, ("a", 1)))
    place.prefill(running)
    waiting = place.spec(SYSTEM, ("b", 1))
    assert place.place(waiting).hit_tokens == 0
    place.end(running)
    assert place.place(waiting).hit_tokens == 30 * 64


def test_what_a_prompt_overwrites_is_gone_before_the_report() -> None:
    """Two slots, a third prompt: the one idle for longest is credited no more."""
    place = a_place()
    place.run(place.spec(("first", 20)), "w0")
    place.run(place.spec(("second", 20)), "w0")
    place.run(place.spec(("third", 20)), "w0")
    found = [place.place(place.spec((name, 20))).hit_tokens for name in ("first", "second")]
    assert found == [0, 20 * 64]


def test_what_a_report_takes_back_is_taken_from_the_slot() -> None:
    """So that the next prompt that begins alike is predicted right."""
    place = a_place()
    place.run(place.spec(SYSTEM), "w0")
    place.report("w0", 1, removed=chain(SYSTEM)[10:])
    cache = _seat(place, "w0").slot_cache
    assert cache is not None
    assert cache.reusable_blocks(chain(SYSTEM)) == 10
    assert place.place(place.spec(SYSTEM)).hit_tokens == 0  # 640 tokens: below the floor.


def test_a_full_report_is_all_that_is_known_of_idle_slots() -> None:
    """It lists what our own account has not: that is taken as told."""
    place = a_place()
    place.run(place.spec(SYSTEM), "w0")
    assert place.report("w0", 1, added=chain(("told", 30)), full=True)
    assert place.place(place.spec(("told", 30))).hit_tokens == 30 * 64
    assert place.place(place.spec(SYSTEM)).hit_tokens == 0


def test_an_engine_that_starts_anew_has_no_slots_in_use() -> None:
    """All that is known of them is dropped with the cache."""
    place = a_place()
    running = place.give(place.spec(SYSTEM), "w0")
    place.router.cache_lost(place.workers["w0"])
    place.end(running)
    assert place.place(place.spec(SYSTEM)).hit_tokens == 0
    assert _seat(place, "w0").slot_cache is not None


def test_a_worker_that_caches_blocks_again_is_followed_no_more() -> None:
    """Another engine came under the same name."""
    place = a_place()
    place.change("w0", cache_sequences=0)
    assert _seat(place, "w0").slot_cache is None
    place.give(place.spec(SYSTEM), "w0")
    assert place.place(place.spec(SYSTEM, ("a", 1))).hit_tokens == 30 * 64


def _seat(place: Place, worker: str) -> Seat:
    seat = place.router._roster.seat(worker)  # type: ignore[attr-defined]
    assert isinstance(seat, Seat)
    return seat
