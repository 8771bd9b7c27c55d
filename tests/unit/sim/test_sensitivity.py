"""Whether the order of policies hangs on one constant."""

from broker.sim.figures import Figures
from broker.sim.runs import Setting
from broker.sim.sensitivity import UNCHANGED, sensitivity, variants
from tests.comparisons import some_figures


def seeds(*ttft_s: float) -> list[Figures]:
    """Build the figures of some seeds."""
    return [some_figures(one) for one in ttft_s]


BASE = {"first_token": seeds(0.1, 0.11, 0.12), "lmetric": seeds(0.2, 0.21, 0.22)}


def test_each_variant_changes_one_constant() -> None:
    """Prefill, decode and memory are halved and doubled, each alone."""
    found = variants(Setting())
    base = found.pop(UNCHANGED)
    assert len(found) == 6
    slow = found["prefill rate halved"]
    assert slow.profile.prefill_s.slope_s == 2 * base.profile.prefill_s.slope_s
    assert slow.profile.prefill_s.constant_s == base.profile.prefill_s.constant_s
    assert slow.profile.decode_s == base.profile.decode_s
    steep = found["decode slope doubled"]
    assert steep.profile.decode_s.slope_s == 2 * base.profile.decode_s.slope_s
    assert steep.profile.prefill_s == base.profile.prefill_s
    assert found["KV size halved"].blocks_per_worker == 1000
    assert found["KV size halved"].profile == base.profile


def test_order_holds_where_no_pair_is_reversed() -> None:
    """Other figures in the same order."""
    slower = {"first_token": seeds(0.3, 0.31, 0.32), "lmetric": seeds(0.6, 0.61, 0.62)}
    found = sensitivity({UNCHANGED: BASE, "slow": slower}, ours=["first_token"])
    assert found.holds
    assert found.variants[1].order == ("first_token", "lmetric")
    assert round(found.variants[1].ours_to_best_peer or 0, 3) == 0.508


def test_reversed_pair_is_named() -> None:
    """Beyond doubt one way without the change, and beyond doubt the other way with it."""
    turned = {"first_token": BASE["lmetric"], "lmetric": BASE["first_token"]}
    found = sensitivity({UNCHANGED: BASE, "turned": turned}, ours=["first_token"])
    assert not found.holds
    assert found.variants[1].reversed_pairs == (("first_token", "lmetric"),)


def test_doubtful_reversal_is_none() -> None:
    """A lead that the seeds don't agree on reverses nothing."""
    doubtful = {"first_token": seeds(0.1, 0.3, 0.2), "lmetric": seeds(0.3, 0.1, 0.19)}
    assert sensitivity({UNCHANGED: BASE, "doubtful": doubtful}, ours=["first_token"]).holds


def test_variant_that_could_not_run_says_why() -> None:
    """Half the memory may be too little for the longest request."""
    found = sensitivity({UNCHANGED: BASE, "small": "does not fit"}, ours=["first_token"])
    assert found.variants[1].problem == "does not fit"
    assert found.variants[1].values == {}
