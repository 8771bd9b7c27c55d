"""What a job costs, and what its lane's jobs taught about its output."""

from broker.core.costs import AVERAGE_JOBS_MAX, Costs, cost_tokens
from tests.unit.core.cluster import a_spec


def test_output_weighs_twice_as_much_as_uncached_prompt() -> None:
    """The cost is 1 · uncached + 2 · output."""
    assert cost_tokens(uncached_tokens=100, output_tokens=50) == 200
    assert cost_tokens(uncached_tokens=7, output_tokens=0) == 7


def test_expected_output_is_the_jobs_own_limit_until_something_is_known() -> None:
    """Nothing known: the limit. Work without any cache is prompt + 2 · expected."""
    costs = Costs()
    assert costs.expected_output_tokens(a_spec(output_tokens_max=300)) == 300
    assert costs.work_tokens(a_spec(prompt_tokens=10, output_tokens_max=300)) == 610


def test_expected_output_moves_from_the_seed_to_the_average() -> None:
    """The first job's limit counts as one job; then each real output takes its part."""
    costs = Costs()
    job = a_spec(output_tokens_max=100)
    costs.learn(job, output_tokens=20)
    assert costs.expected_output_tokens(job) == 60
    costs.learn(job, output_tokens=30)
    assert costs.expected_output_tokens(job) == 50
    for _ in range(200):
        costs.learn(job, output_tokens=10)
    assert costs.expected_output_tokens(job) == 10


def test_expected_output_follows_a_lane_that_changes() -> None:
    """After many jobs the newest still counts one part in AVERAGE_JOBS_MAX."""
    costs = Costs()
    job = a_spec(output_tokens_max=1000)
    for _ in range(1000):
        costs.learn(job, output_tokens=100)
    costs.learn(job, output_tokens=100 + 40 * AVERAGE_JOBS_MAX)
    assert costs.expected_output_tokens(job) == 140


def test_expected_output_never_exceeds_the_jobs_limit() -> None:
    """A short job of a lane with long ones is expected to be short."""
    costs = Costs()
    costs.learn(a_spec(output_tokens_max=500), output_tokens=500)
    assert costs.expected_output_tokens(a_spec(output_tokens_max=16)) == 16


def test_averages_are_kept_apart_by_lane_and_model() -> None:
    """What one lane's jobs write says nothing of another's, nor of another model."""
    costs = Costs()
    costs.learn(a_spec(output_tokens_max=100), output_tokens=0)
    assert costs.expected_output_tokens(a_spec(output_tokens_max=100)) == 50
    assert costs.expected_output_tokens(a_spec(lane="beta", output_tokens_max=100)) == 100
    assert costs.expected_output_tokens(a_spec(model="other", output_tokens_max=100)) == 100
