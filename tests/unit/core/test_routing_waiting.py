"""Stickiness to the last worker, and waiting for the best one."""

import pytest

from broker.core.policy import RoutingPolicy
from broker.core.scoring import CROWDED
from broker.core.state import Phase
from tests.unit.core.routing_builders import (
    CACHE_AWARE,
    SYSTEM,
    Place,
    a_worker,
    chain,
    where,
)

DECODE_S = RoutingPolicy().decode_weight * 50 / 50
"""What 50 tokens at 50 a second add to a score."""


@pytest.mark.parametrize("policy", CACHE_AWARE)
def test_a_prefix_sticks_to_its_last_worker(policy: str) -> None:
    """Two holders alike: the last one is kept for `sticky_s`, then turns decide again."""
    place = Place(6, policy=policy)
    for n in (1, 3):
        place.warm(f"w{n}", SYSTEM)
    assert place.run(place.spec(SYSTEM, ("ask", 1))) == "w1"
    place.at_s += 29.9
    assert where(place, SYSTEM, ("other", 1)) == "w1"
    place.at_s += 0.2
    assert where(place, SYSTEM, ("other", 1)) == "w3"


def test_a_kept_answer_ends_with_the_sticky_time() -> None:
    """An answer that rests on stickiness is given anew once that time is over, without any
    event.
    """
    place = Place(6)
    for n in (1, 3):
        place.warm(f"w{n}", SYSTEM)
    place.run(place.spec(SYSTEM, ("ask", 1)))
    job = place.spec(SYSTEM, ("other", 1))
    assert place.place(job).worker is place.workers["w1"]
    place.at_s += 30.0
    assert place.place(job).worker is place.workers["w3"]


def test_a_conversation_s_next_turn_sticks_to_the_worker_of_the_last() -> None:
    """The whole of a turn's prompt is the key of the next."""
    place = Place(4)
    home = place.run(place.spec(("turn1", 20)))
    job = place.spec(("turn1", 20), ("turn2", 5))
    placement = place.place(job)
    assert place.router.explain(job, placement, at_s=place.at_s).previous_worker == home


def test_a_session_that_went_elsewhere_takes_its_waiting_jobs_along() -> None:
    """A kept answer follows the session's last dispatch."""
    place = Place(3)
    job = place.spec(session="s")
    assert place.place(job).worker is place.workers["w0"]
    place.run(place.spec(session="s"), "w2")
    assert place.place(job).worker is place.workers["w2"]


@pytest.mark.parametrize("policy", CACHE_AWARE)
def test_a_session_sticks_without_blocks(policy: str) -> None:
    """A session whose prompts have no blocks stays with its worker, in its own lane and model."""
    place = Place(3, policy=policy)
    home = place.run(place.spec(session="s"))
    for _ in range(3):
        assert place.run(place.spec(session="s")) == home
    assert place.run(place.spec(session="other")) != home
    assert where(place, session="s") == home


def test_stickiness_is_void_past_the_hard_threshold() -> None:
    """When the last worker's predicted first token is 2 s behind the best, nobody pays for
    leaving.
    """
    for tokens, prompt_tokens, penalised in (
        (15_000, 32, True),
        (17_000, 32, False),
        (8_000, 16_000, True),
    ):
        place = Place(2, hold_for_affinity=False)
        home = place.run(place.spec(session="s"))
        place.give(place.spec(prompt_tokens=tokens), home)
        job = place.spec(session="s", prompt_tokens=prompt_tokens)
        placement = place.place(job)
        candidates = place.router.explain(job, placement, at_s=place.at_s).candidates
        other = next(one for one in candidates if one.worker != home)
        cost = 3 * job.prompt_tokens / 8000 + DECODE_S
        assert other.score == pytest.approx(cost + (0.05 if penalised else 0.0))


@pytest.mark.parametrize("field", [{"draining": True}, {"phase": Phase.GONE}])
def test_stickiness_is_void_when_the_worker_may_not_serve(field: dict[str, object]) -> None:
    """A drained or gone last worker is named, and costs nobody anything."""
    place = Place(3)
    home = place.run(place.spec(session="s"))
    place.change(home, **field)
    job = place.spec(session="s")
    placement = place.place(job)
    explanation = place.router.explain(job, placement, at_s=place.at_s)
    assert explanation.previous_worker == home
    cost = 3 * job.prompt_tokens / 8000 + DECODE_S
    assert [one.score for one in explanation.candidates] == pytest.approx([cost, cost])
    assert home not in {one.worker for one in explanation.candidates}


def test_what_most_hold_sticks_to_nobody() -> None:
    """A prefix that half of the workers or more hold has no last worker."""
    for holders, previous in ((1, "w0"), (2, "")):
        place = Place(4)
        for n in range(holders):
            place.warm(f"w{n}", SYSTEM)
        place.run(place.spec(SYSTEM, ("ask", 1)), "w0")
        job = place.spec(SYSTEM, ("other", 1))
        placement = place.place(job)
        explanation = place.router.explain(job, placement, at_s=place.at_s)
        assert explanation.previous_worker == previous


def test_a_job_is_held_for_its_best_worker() -> None:
    """While the holder is still the best by its predicted wait, the job waits for it; the moment it
    has room, the job goes there.
    """
    place = Place(2)
    place.warm("w0", SYSTEM)
    lease = place.give(place.spec(("other", 9)), "w0")
    job = place.spec(SYSTEM, ("ask", 1))
    held = place.place(job)
    assert (held.worker, held.held_for) == (None, "w0")
    assert (held.hit_tokens, held.servable) == (1920, True)
    place.prefill(lease)
    assert place.place(job).worker is place.workers["w0"]


def test_a_cold_job_is_held_for_a_much_faster_worker() -> None:
    """What makes a worker the best one does not matter: speed holds a job as its cache does."""
    for rate, home, held in ((1000.0, "", "w0"), (7500.0, "w1", "")):
        place = Place(2)
        place.change("w1", prefill_tokens_s=rate)
        place.give(place.spec(("other", 10)), "w0")
        placement = place.place(place.spec(("own", 30)))
        assert placement.held_for == held
        assert (placement.worker.id if placement.worker else "") == home


def test_without_holding_a_better_worker_is_not_waited_for() -> None:
    """`hold_for_affinity` off: whatever is cached, or fast, the best with room is taken."""
    place = Place(2, hold_for_affinity=False)
    place.warm("w0", SYSTEM)
    place.change("w1", prefill_tokens_s=1000.0)
    place.give(place.spec(("other", 10)), "w0")
    assert where(place, SYSTEM) == "w1"
    assert where(place, ("own", 30)) == "w1"


@pytest.mark.parametrize(("share", "held"), [(0.0, ""), (0.3, ""), (0.5, "w0"), (1.0, "w0")])
def test_quicker_decoding_counts_in_part_where_it_must_be_waited_for(
    share: float, held: str
) -> None:
    """w0 decodes in half the time, which is worth 0.2 s by weight; its backlog takes 0.08 s more.

    Of two with room it is the better one, whatever the share.
    """
    place = Place(2, decode_weight=0.2, hold_decode_share=share, backlog_s_max=0.05)
    place.change("w0", decode_tokens_s=100.0)
    assert where(place, ("own", 1), output_tokens_max=100) == "w0"
    place.give(place.spec(prompt_tokens=640), "w0")
    placement = place.place(place.spec(("own", 1), output_tokens_max=100))
    assert placement.held_for == held


@pytest.mark.parametrize(("times", "held"), [(0, ""), (1, ""), (3, "w0")])
def test_it_counts_the_more_the_more_run(times: int, held: str) -> None:
    """As above at a share of 0.3, which is enough where half as many again run as are few."""
    place = Place(
        [a_worker(f"w{index}", index=index, slots=64) for index in range(2)],
        decode_weight=0.2,
        slowdown_weight=0.0,
        interference_weight=0.0,
        size_weight=0.0,
        hold_decode_share=0.3,
        backlog_s_max=0.05,
    )
    place.change("w0", decode_tokens_s=100.0)
    for _ in range(round(times * CROWDED)):
        place.prefill(place.give(place.spec(prompt_tokens=1), "w1"))
    place.give(place.spec(prompt_tokens=640), "w0")
    placement = place.place(place.spec(("own", 1), output_tokens_max=100))
    assert placement.held_for == held


def test_no_hold_where_nobody_has_room() -> None:
    """When no worker has room at all, the job waits for room, not for one worker."""
    place = Place(1)
    place.warm("w0", SYSTEM)
    place.give(place.spec(("other", 100)), "w0")
    placement = place.place(place.spec(SYSTEM))
    assert (placement.worker, placement.held_for) == (None, "")


def test_a_hold_ends_where_waiting_costs_more_than_it_saves() -> None:
    """A holder with too long a backlog loses to a cold worker at once."""
    saving_s = 3 * 1920 / 8000
    for backlog_s, held in ((saving_s - 0.02, True), (saving_s + 0.02, False)):
        place = Place(2)
        place.warm("w0", SYSTEM)
        place.give(place.spec(prompt_tokens=round(backlog_s * 8000)), "w0")
        placement = place.place(place.spec(SYSTEM))
        assert bool(placement.held_for) is held


@pytest.mark.parametrize(("backlog_s", "held"), [(1.22, True), (1.26, False)])
def test_nobody_waits_for_a_much_later_first_token(backlog_s: float, held: bool) -> None:
    """However much is cached, a first token later by more than `hold_s_max` is too late: 1 s
    after the 0.24 s that the prompt takes elsewhere.
    """
    place = Place(2, bias=100.0)
    place.warm("w0", SYSTEM)
    place.give(place.spec(prompt_tokens=round(backlog_s * 8000)), "w0")
    assert bool(place.place(place.spec(SYSTEM)).held_for) is held
    place.router.reconfigured(RoutingPolicy(bias=100.0, hold_s_max=0.95, join_s_max=0.0))
    assert place.place(place.spec(SYSTEM)).held_for == ""
    place.router.reconfigured(RoutingPolicy(bias=100.0, hold_s_max=5.0, join_s_max=0.0))
    assert place.place(place.spec(SYSTEM)).held_for == "w0"


def test_nobody_is_held_longer_at_all_without_time_to_hold() -> None:
    """With `hold_s_max` 0 a job still waits for a worker whose first token comes sooner, not for
    one that only costs others less.
    """
    for backlog_tokens, held in ((1500, True), (2100, False)):
        place = Place(2, hold_s_max=0.0)
        place.warm("w0", SYSTEM)
        place.give(place.spec(prompt_tokens=backlog_tokens), "w0")
        assert bool(place.place(place.spec(SYSTEM)).held_for) is held


def test_a_hold_lasts_no_longer_than_it_gains() -> None:
    """If the holder gets no room in the time that waiting was to save, the job goes elsewhere: a
    wrong guess costs twice at most.
    """
    place = Place(2)
    place.warm("w0", SYSTEM)
    place.give(place.spec(("other", 10)), "w0")
    job = place.spec(SYSTEM)
    began_at_s = place.at_s
    while place.place(job).held_for:
        place.at_s += 0.01
        assert place.at_s - began_at_s < 3 * 1920 / 8000
    assert place.place(job).worker is place.workers["w1"]
    assert place.at_s - began_at_s > 0.5


def test_a_hold_is_not_started_anew_by_every_change() -> None:
    """Changes elsewhere, and reports, don't restart the time that a job may be held: each new look
    sees the worker more overdue, and the gain is used up after 0.4 s.
    """
    place = Place(2)
    place.warm("w0", SYSTEM)
    place.give(place.spec(("other", 10)), "w0")
    job = place.spec(SYSTEM)
    held = ""
    for number in range(90):
        held = place.place(job).held_for
        assert bool(held) is (number < 39) or 39 <= number < 42
        place.at_s += 0.01
        place.report("w0", 2 + number, added=chain((f"x{number}", 1)))
        place.change("w1", trust=0.5 + number / 200)
    assert not held


def test_a_full_holder_is_waited_for_by_when_a_slot_frees() -> None:
    """A holder without a slot is worth waiting for when the first of its jobs ends soon, not
    else.
    """
    for output_tokens, held in ((10, True), (500, False)):
        place = Place([a_worker("w0", slots=2), a_worker("w1", index=1)])
        place.warm("w0", SYSTEM)
        for tokens in (1000, output_tokens):
            place.prefill(place.give(place.spec(), "w0", output_tokens=tokens))
        placement = place.place(place.spec(SYSTEM))
        assert (placement.held_for == "w0") is held


def test_progress_of_its_jobs_brings_a_full_holder_nearer() -> None:
    """What a job has put out already no longer counts to the wait for its slot."""
    place = Place([a_worker("w0", slots=1), a_worker("w1", index=1)])
    place.warm("w0", SYSTEM)
    lease = place.give(place.spec(), "w0", output_tokens=500)
    place.prefill(lease)
    place.change("w0", trust=0.97)
    job = place.spec(SYSTEM)
    assert place.place(job).worker is place.workers["w1"]
    lease.output_tokens = 495
    place.change("w0", trust=0.98)
    assert place.place(job).held_for == "w0"
    lease.output_tokens = 700
    place.change("w0", trust=0.99)
    assert place.place(job).held_for == "w0"


def test_a_holder_without_kv_room_is_waited_for_like_a_full_one() -> None:
    """KV cache frees when a job ends, as a slot does."""
    for output_tokens, held in ((10, True), (500, False)):
        place = Place([a_worker("w0", kv_tokens_max=460), a_worker("w1", index=1)])
        place.warm("w0", SYSTEM)
        place.prefill(place.give(place.spec(("x", 5)), "w0", output_tokens=output_tokens))
        placement = place.place(place.spec(SYSTEM), output_tokens=50)
        assert (placement.held_for == "w0") is held


def test_a_worker_that_said_busy_is_expected_back_at_its_next_report() -> None:
    """A held-off holder counts as a second's wait: too long for a small saving, not for a large
    one.
    """
    for system, held in ((30, ""), (100, "w0")):
        place = Place(2)
        place.warm("w0", ("system", system))
        place.change("w0", held_off=True)
        assert place.place(place.spec(("system", system))).held_for == held


@pytest.mark.parametrize("holders", [3, 8, 80])
def test_of_many_holders_without_room_the_soonest_is_waited_for(holders: int) -> None:
    """When all that hold a prefix are busy, the job is held for the one that is free first."""
    place = Place(200)
    for n in range(holders):
        place.warm(f"w{n}", SYSTEM)
        place.give(place.spec(prompt_tokens=3000 if n != 2 else 800), f"w{n}")
    place.give(place.spec(prompt_tokens=100), "w190")
    assert place.place(place.spec(SYSTEM)).held_for == "w2"
    placement = place.place(place.spec(SYSTEM), excluded=["w2"])
    assert placement.held_for not in {"w2", "w190"}
    assert placement.held_for
