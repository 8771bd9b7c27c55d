"""A request as a job: what the mind is told of it, and what its caller asks beside it."""

from dataclasses import replace

from msgspec import Struct

from broker.core.events import JobSpec
from broker.sim.request import Request
from broker.wire.ids import job_key

MODEL = "model"


class Terms(Struct, frozen=True, kw_only=True):
    """What a caller asks beside the request itself."""

    deadline_s: float | None = None
    """After its arrival."""
    streamed: bool = False
    restart_visible: bool = False
    adapter: str = ""
    client: str = ""
    jobs_behind: int = 0


def key_of(request: Request) -> str:
    """Return the key of a request's job."""
    return job_key(request.lane, f"j{request.index}")


def spec_of(request: Request, terms: Terms | None, *, at_s: float) -> JobSpec:
    """Return a request as it is pulled from its queue, where it stands since `at_s`."""
    job = JobSpec(
        key_of(request),
        request.lane,
        request.band,
        MODEL,
        session=request.session,
        prompt_tokens=request.prompt_tokens,
        output_tokens_max=request.output_tokens_max,
        blocks=request.blocks,
        block_tokens=float(request.block_tokens),
        enqueued_at_s=at_s,
        stream_sequence=request.index + 1,
    )
    if terms is None:
        return job
    return replace(
        job,
        deadline_at_s=None if terms.deadline_s is None else at_s + terms.deadline_s,
        streamed=terms.streamed,
        restart_visible=terms.restart_visible,
        adapter=terms.adapter,
        client=terms.client,
        jobs_behind=terms.jobs_behind,
    )
