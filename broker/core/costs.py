"""What a job costs, in weighted tokens: 1 · uncached prompt + 2 · output.

An output token holds a decode slot and its KV cache for a whole step, a prompt token shares its
step with thousands of others; 1 : 2 is what the virtual token counter's authors chose (Sheng et
al., "Fairness in Serving Large Language Models", OSDI 2024, section 4.1) and what public price
lists come near to. Expected output is a moving average per lane and model, because tenants differ
more than models do.
"""

from dataclasses import dataclass

from broker.core.events import JobSpec

PROMPT_WEIGHT = 1
OUTPUT_WEIGHT = 2

AVERAGE_JOBS_MAX = 20
"""Jobs that the average remembers: a lane that changes its habits is believed after about as
many."""


@dataclass(slots=True)
class _Average:
    tokens: float
    jobs: int = 1
    """The seed counts as one job."""


def cost_tokens(*, uncached_tokens: int, output_tokens: int) -> int:
    """Weigh a job's work."""
    return PROMPT_WEIGHT * uncached_tokens + OUTPUT_WEIGHT * output_tokens


class Costs:
    """Expected outputs, learned from the jobs that ended."""

    def __init__(self) -> None:
        self._averages: dict[tuple[str, str], _Average] = {}

    def expected_output_tokens(self, job: JobSpec) -> int:
        """Expect the lane's average output for the model, at most the job's own limit."""
        average = self._averages.get((job.lane, job.model))
        if average is None:
            return job.output_tokens_max
        return min(job.output_tokens_max, round(average.tokens))

    def work_tokens(self, job: JobSpec) -> int:
        """Tell a job's cost without any cache: nobody can promise it a hit."""
        output_tokens = self.expected_output_tokens(job)
        return cost_tokens(uncached_tokens=job.prompt_tokens, output_tokens=output_tokens)

    def learn(self, job: JobSpec, *, output_tokens: int) -> None:
        """Take a job's real output into the average; the first job's own limit is its seed."""
        average = self._averages.setdefault(
            (job.lane, job.model), _Average(float(job.output_tokens_max))
        )
        average.jobs = min(average.jobs + 1, AVERAGE_JOBS_MAX)
        average.tokens += (output_tokens - average.tokens) / average.jobs
