"""What a score says of decoding is what the worker itself says."""

from broker.core.policy import RoutingPolicy
from broker.core.scoring import Scored, first_token, need_of
from broker.core.seat import Seat
from tests.unit.core.routing_builders import a_spec, a_worker


def test_decoding_costs_as_much_as_the_worker_tells() -> None:
    """The loop over candidates has the sum of its own, for speed; both must be one."""
    policy = RoutingPolicy(decode_weight=0.3, slowdown_weight=0.2)
    seat = Seat(a_worker(kv_tokens_max=100_000), turn=1)
    seat.step_s, seat.step_slope_s, seat.slowdown_weight = 0.01, 2e-6, 0.2 * 5
    need = need_of(a_spec(prompt_tokens=2_000), 300)
    one = Scored(seat, 500, 0.0, 0.0, fits=True)
    first_token(policy, need, [one])
    assert one.decode_s > 0
    assert one.decode_s == seat.decode_cost_s(policy, need.kv_tokens - 500, 300)
    assert one.score == one.decode_s
