"""One run: what is refused, what a seed moves, and that equal runs are equal."""

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from broker.sim.contestants import contestant, contestants
from broker.sim.errors import SimError
from broker.sim.network import Network
from broker.sim.peers.base import Peer, PeerWorker
from broker.sim.request import Request, Workload
from broker.sim.runs import JITTER, Outcome, Setting, digest, run
from broker.sim.workload.loading import load
from broker.sim.world import Change, FleetChange
from tests.unit.sim.worlds import BY_HAND, Told, a_profile, a_request, a_workload, a_world

ROOT = Path(__file__).parents[3]

SMALL = Setting(
    workers=3,
    blocks_per_worker=40,
    profile=BY_HAND,
    network=Network(lost_ratio=0.1, lost_answer_ratio=0.05, late_order_ratio=0.05, late_s_max=1.0),
    changes=(
        FleetChange(at_s=2.0, change=Change.LOSE, host=1),
        FleetChange(at_s=3.0, change=Change.JOIN),
    ),
)
"""Where much happens: chance has a part in the order of things."""


def lanes_and_prefixes(count: int = 120) -> Workload:
    """Return requests of several lanes and bands, with shared prefixes, at even gaps."""
    return a_workload(
        *(
            a_request(
                n,
                n / 30,
                lane=f"lane-{n % 5}",
                band=n % 3,
                session=f"s{n % 7}" if n % 2 else "",
                blocks=(n % 6, 10 + n % 12),
                prompt_tokens=230,
                output_tokens=3 + n % 9,
                output_tokens_max=16,
            )
            for n in range(count)
        )
    )


def a_run(label: str, *, seed: int = 0) -> Outcome:
    """Run them."""
    return run(lanes_and_prefixes(), contestant(label), SMALL, seed=seed)


def arrivals_s(workload: Workload, *, seed: int, speed: float = 1.0) -> list[float]:
    """Return when requests came: a policy that is asked notes it."""
    seen: list[float] = []
    robin = contestant("round-robin")
    assert robin.peer is not None
    make = robin.peer

    class Noting:
        """Round robin that notes when it is asked."""

        def __init__(self, peer: Peer) -> None:
            self._peer = peer
            self.first_token, self.ended = peer.first_token, peer.ended
            self.lost = peer.lost

        def choose(self, request: Request, workers: Sequence[PeerWorker], *, at_s: float) -> int:
            """Note it."""
            seen.append(at_s)
            return self._peer.choose(request, workers, at_s=at_s)

    noting = replace(robin, peer=lambda rng: Noting(make(rng)))
    run(workload, noting, Setting(profile=BY_HAND, speed=speed), seed=seed)
    return seen


# ---- what fits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["round-robin", "first_token"])
def test_a_request_that_fits_no_worker_is_told_with_what_to_do(label: str) -> None:
    """The error names the request, what it needs, what there is, and the option."""
    workload = a_workload(a_request(0), a_request(1, prompt_tokens=996))
    with pytest.raises(SimError) as raised:
        run(workload, contestant(label), Setting(workers=2, blocks_per_worker=10, profile=BY_HAND))
    said = str(raised.value)
    assert "request 1 of w needs 1001 tokens" in said
    assert "has 1000" in said
    assert "--blocks-per-worker" in said


@pytest.mark.parametrize("label", ["round-robin", "first_token"])
@pytest.mark.parametrize("after", [None, 0])
def test_a_request_that_comes_after_a_year_is_a_slip(label: str, after: int | None) -> None:
    """Nanoseconds taken for milliseconds: it ran for ever. At a greater speed it may run."""
    days = 40_000 * 86_400.0
    workload = a_workload(a_request(0), a_request(1, days, after=after))
    with pytest.raises(SimError, match=r"request 1 of w comes 40,000 days after.*in ms"):
        run(workload, contestant(label), Setting(workers=2, profile=BY_HAND))
    quick = Setting(workers=2, profile=BY_HAND, speed=1e6)
    assert run(workload, contestant("round-robin"), quick).figures.requests == 2


def test_a_request_that_just_fits_runs() -> None:
    """Prompt and answer may fill the whole cache."""
    workload = a_workload(a_request(0, prompt_tokens=995))
    setting = Setting(workers=1, blocks_per_worker=10, profile=BY_HAND)
    assert run(workload, contestant("round-robin"), setting).figures.requests == 1


def test_among_workers_that_differ_the_smallest_must_hold_it() -> None:
    """Any of them may be chosen."""
    fleet = (a_profile(kv_tokens_max=5000), a_profile(kv_tokens_max=500))
    workload = a_workload(a_request(0, prompt_tokens=600))
    with pytest.raises(SimError, match="a worker has 500"):
        run(workload, contestant("round-robin"), Setting(profiles=fleet))


def test_a_setting_makes_its_fleet() -> None:
    """So many workers alike, with so many blocks of the profile; or those that are named."""
    fleet = Setting(workers=3, blocks_per_worker=7, profile=BY_HAND).fleet()
    assert [one.kv_tokens_max for one in fleet] == [700, 700, 700]
    named = (a_profile(slots=1), a_profile(slots=2))
    assert Setting(workers=9, profiles=named).fleet() == named


# ---- seeds ---------------------------------------------------------------------------------------


def test_seed_0_takes_arrivals_as_recorded() -> None:
    """No gap moves; speed divides them."""
    workload = a_workload(*(a_request(n, at_s) for n, at_s in enumerate((0.5, 0.5, 1.75, 4.0))))
    assert arrivals_s(workload, seed=0) == [0.5, 0.5, 1.75, 4.0]
    assert arrivals_s(workload, seed=0, speed=2.0) == [0.25, 0.25, 0.875, 2.0]


def test_other_seeds_move_every_gap_by_at_most_a_tenth() -> None:
    """Each gap stays within 10 % of itself; two seeds move it differently."""
    workload = a_workload(*(a_request(n, 1.0 + n) for n in range(200)))
    moved = [arrivals_s(workload, seed=seed) for seed in (1, 2)]
    gaps = [[after - before for before, after in pairwise(one)] for one in moved]
    for one in gaps:
        assert all(1 - JITTER <= gap <= 1 + JITTER for gap in one)
        assert min(one) < 0.92
        assert max(one) > 1.08
    assert gaps[0] != gaps[1]


@pytest.mark.parametrize("label", ["first_token", "weighted", "power-of-two", "dynamo"])
def test_the_same_seed_is_the_same_run(label: str) -> None:
    """Every instant and worker is the same again, and another seed's is not."""
    first = a_run(label, seed=3)
    assert a_run(label, seed=3) == first
    assert a_run(label, seed=4).digest != first.digest


def test_policies_are_told_apart_by_their_digests() -> None:
    """Of one seed, each policy does something of its own."""
    labels = ("first_token", "round-robin", "least-requests", "lmetric")
    assert len({a_run(label, seed=1).digest for label in labels}) == len(labels)


@pytest.mark.parametrize("column", ["given_s", "first_token_s", "ended_s", "host"])
def test_a_digest_sees_every_column(column: str) -> None:
    """One more or one less in one row is another digest."""
    world = a_world(a_request(0), a_request(1, 1.0))
    world.run(Told(world))
    before = digest(world.records)
    getattr(world.records, column)[1] += 1
    assert digest(world.records) != before


def test_one_digest_under_every_hash_seed() -> None:
    """The order of sets of strings decides nothing: every contestant, three hash seeds."""
    program = "from tests.unit.sim.test_runs import all_digests\nprint(*all_digests(), sep='\\n')"
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("0", "1", "4242")
    }
    assert len(said) == 1
    (lines,) = said
    assert len(lines.splitlines()) == len(contestants())


def all_digests() -> list[str]:
    """Run every contestant."""
    return [f"{one.label}: {a_run(one.label, seed=2).digest}" for one in contestants()]


# ---- beside the outcome --------------------------------------------------------------------------


def test_progress_is_told_and_changes_nothing() -> None:
    """It rises to nearly all, and the run is the same as without."""
    told: list[tuple[int, int]] = []
    workload, one = lanes_and_prefixes(), contestant("first_token")
    watched = run(workload, one, SMALL, progress=lambda ended, of: told.append((ended, of)))
    assert watched == run(workload, one, SMALL)
    assert told == sorted(told)
    assert told[0] == (0, 120)
    assert 60 < told[-1][0] <= 120


def test_decisions_are_timed_where_asked() -> None:
    """Steps of the mind take what the timer says; a peer's have none; the run is the same."""
    ticks = iter(range(10**9))
    timed = run(
        lanes_and_prefixes(), contestant("first_token"), SMALL, timer=lambda: float(next(ticks))
    )
    assert timed.figures.decision_s is not None
    assert (timed.figures.decision_s.mean, timed.figures.decision_s.p99) == (1.0, 1.0)
    assert timed.digest == a_run("first_token").digest
    peer = run(lanes_and_prefixes(), contestant("lmetric"), SMALL, timer=lambda: 0.0)
    assert peer.figures.decision_s is None


def test_a_stream_is_run_as_a_list_is() -> None:
    """Requests made as they are read come to the same."""
    stream = load("generated:many?requests=300&requests_per_s=200", seed=1)
    listed = replace(stream, requests=list(stream.requests))
    setting = Setting(workers=4, blocks_per_worker=20)
    for label in ("first_token", "lmetric"):
        one = contestant(label)
        assert run(stream, one, setting, seed=1) == run(listed, one, setting, seed=1)


def test_what_each_contestant_reports_adds_up() -> None:
    """All requests are answered under every contestant, in no less time than alone."""
    for one in contestants():
        figures = run(lanes_and_prefixes(), one, SMALL, seed=1).figures
        assert (figures.requests, figures.refused) == (120, 0), one.label
        assert figures.ttft_s.mean >= 0.03, one.label
        assert 0 < figures.cached_token_ratio < 1, one.label
        assert 0 < figures.utilisation_mean <= 1, one.label
        assert 0.2 <= figures.jain_index <= 1, one.label
