"""Ours against the best peer for each measure."""

import pytest

from broker.sim.comparison import FEW_SEEDS, LOADED, against_best_peers, best_peers
from tests.comparisons import a_load, an_entry

OURS = an_entry("first_token", [0.10, 0.11, 0.12], itl_s=an_entry("lmetric", [0.02]).ttft_s)
QUICK = an_entry("dynamo scale=32", [0.2, 0.21, 0.22], cached_token_ratio=0.1)
CACHED = an_entry("lmetric", [0.3, 0.31, 0.32], cached_token_ratio=0.4)


def test_each_measure_has_its_own_best_peer() -> None:
    """The quickest peer and the one that finds most in caches are different ones."""
    best = best_peers([OURS, CACHED, QUICK])
    assert best["ttft_s.mean"].policy == "dynamo scale=32"
    assert best["cached_token_ratio"].policy == "lmetric"
    assert best["cached_token_ratio"].value == pytest.approx(0.4)


def test_better_and_worse_are_claimed_by_the_direction_of_the_measure() -> None:
    """Less TTFT is better, a smaller cached share is worse."""
    entries = [OURS, CACHED, QUICK]
    found = against_best_peers(entries, best_peers(entries), a_load())["first_token"]
    assert found["ttft_s.mean"].verdict == "better"
    assert found["ttft_s.mean"].ratio == 0.11 / 0.21
    assert found["cached_token_ratio"].verdict == "worse"
    assert found["itl_s.mean"].verdict == "worse"
    assert found["jain_index"].verdict == "no difference"


def test_itl_is_not_compared_under_load() -> None:
    """From 80 % load on, a difference in ITL is told but not claimed."""
    entries = [OURS, QUICK]
    found = against_best_peers(entries, best_peers(entries), a_load(0.8))["first_token"]
    assert (found["itl_s.mean"].verdict, found["itl_s.mean"].reason) == ("no claim", LOADED)
    assert found["ttft_s.mean"].verdict == "better"


def test_two_seeds_claim_nothing_and_say_why() -> None:
    """The ratio stands, the claim does not."""
    entries = [an_entry("first_token", [0.1, 0.1]), an_entry("lmetric", [0.2, 0.2])]
    found = against_best_peers(entries, best_peers(entries), a_load())["first_token"]
    assert found["ttft_s.mean"].ratio == 0.5
    assert (found["ttft_s.mean"].verdict, found["ttft_s.mean"].reason) == ("no claim", FEW_SEEDS)


def test_what_is_certain_but_tiny_is_no_difference() -> None:
    """Half a thousandth under every seed is not worth a claim, two thousandths are."""
    peer = an_entry("lmetric", [0.2, 0.2, 0.2])
    for factor, verdict in ((0.9995, "no difference"), (0.998, "better")):
        entries = [an_entry("first_token", [0.2 * factor] * 3), peer]
        found = against_best_peers(entries, best_peers(entries), a_load())["first_token"]
        assert found["ttft_s.mean"].verdict == verdict


def test_no_ratio_to_nothing() -> None:
    """A best peer at 0 gives a difference, no ratio."""
    entries = [OURS, QUICK]
    found = against_best_peers(entries, best_peers(entries), a_load())["first_token"]
    assert found["hit_dip"].ratio is None


def test_without_peers_there_is_nothing_to_beat() -> None:
    """Ours alone is compared with nobody."""
    assert best_peers([OURS]) == {}
    assert against_best_peers([OURS], {}, a_load()) == {}
