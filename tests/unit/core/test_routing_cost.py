"""What a decision costs, counted in operations: nearly the same with 16 workers and with 1,024."""

import random
from unittest.mock import patch

from broker.core.cache_router import CacheAwareRouter
from broker.core.candidates import WALK_MAX
from broker.core.seat import Seat
from tests.unit.core.routing_builders import Place, a_worker, chain

SYSTEM = ("system", 30)


def cost(workers: int, *, holders_share: float, load_share: float) -> tuple[float, float, float]:
    """Return probes, scores and workers looked at, per decision, over jobs of all kinds."""
    place = Place([a_worker(f"w{n}", index=n, slots=8) for n in range(workers)])
    rng = random.Random(1)
    for n in range(workers):
        if n < workers * holders_share:
            place.warm(f"w{n}", SYSTEM)
        if rng.random() < load_share:
            place.prefill(place.give(place.spec((f"load{n}", rng.randrange(1, 9))), f"w{n}"))
    router = place.router
    assert isinstance(router, CacheAwareRouter)
    probes, scores, decisions = router.index.probes_count, router.scored_count, 60
    with patch.object(Seat, "fits", autospec=True, side_effect=Seat.fits) as looked:
        for n in range(decisions):
            first = SYSTEM if n % 2 else (f"cold{n}", 30)
            lease = place.give(place.spec(first, (f"ask{n}", 3)))
            place.prefill(lease)
    return (
        (router.index.probes_count - probes) / decisions,
        (router.scored_count - scores) / decisions,
        looked.call_count / decisions,
    )


def test_a_decision_costs_the_same_with_any_number_of_workers() -> None:
    """Case 10: 64 times the workers cost at most twice the probes and scores, whether few, half or
    all of them hold the prefix, idle or loaded; and never more looks than the bounds allow.
    """
    for holders_share in (0.0, 0.02, 0.5, 1.0):
        for load_share in (0.0, 0.9):
            small = cost(16, holders_share=holders_share, load_share=load_share)
            large = cost(1024, holders_share=holders_share, load_share=load_share)
            assert large[0] <= 2 * small[0] + 4
            assert large[1] <= 2 * small[1] + 4
            assert large[2] <= 3 * WALK_MAX


def test_a_waiting_job_costs_little_to_ask_about_again() -> None:
    """With 64 jobs waiting, a dispatch and an end elsewhere cost each of them two scores at
    most.
    """
    place = Place([a_worker(f"w{n}", index=n) for n in range(200)])
    for n in range(20):
        place.warm(f"w{n}", (f"system{n}", 30))
    jobs = [place.spec((f"system{n % 20}", 30), (f"ask{n}", 2)) for n in range(64)]
    for job in jobs:
        place.place(job)
    router = place.router
    assert isinstance(router, CacheAwareRouter)
    probes = router.index.probes_count
    place.run(place.spec(("cold", 40)), "w150")
    scores = router.scored_count
    for job in jobs:
        place.place(job)
    assert router.scored_count - scores <= 2 * 64
    assert router.index.probes_count - probes <= 8
    place.report("w151", 1, added=chain(("elsewhere", 40)), full=True)
    for job in jobs:
        place.place(job)
    assert router.index.probes_count - probes <= 8
