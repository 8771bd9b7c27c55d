"""From a worker's list to a held job: what a new leader finds running, it takes over.

A list comes from a worker, so it is judged like any message: an order to renew is published to what
it names as the job's ack subject.
"""

import re

import structlog

from broker.service.held import Held
from broker.service.stages import Stage
from broker.wire import subjects
from broker.wire.ids import MalformedName, is_token, split_job_key
from broker.wire.messages import InFlight

_ACK_SUBJECT = re.compile(r"\$JS\.ACK(\.[A-Za-z0-9_-]+){7,}")
"""Nothing else that a worker says may be published to."""

_log = structlog.get_logger(__name__)


def listed(entry: InFlight) -> Held | None:
    """Make a running job that a worker lists a held one; None when it can't be a job."""
    lane, job_id = split_job_key(entry.key)
    try:
        subject = subjects.jobs(lane, entry.band, entry.model)
    except MalformedName:
        subject = ""
    named = subject and is_token(lane) and is_token(job_id)
    if not named or not _ACK_SUBJECT.fullmatch(entry.ack_subject):
        _log.warning("adoption.no_job", job=entry.key, ack_subject=entry.ack_subject)
        return None
    return Held(
        key=entry.key,
        lane=lane,
        band=entry.band,
        model=entry.model,
        job_id=job_id,
        client=entry.client if is_token(entry.client) else "",
        stream=subjects.jobs_stream(lane, entry.band),
        subject=subject,
        sequence=entry.stream_sequence,
        ack_subject=entry.ack_subject,
        enqueued_at_s=entry.enqueued_at_s,
        speaks_json=entry.speaks_json,
        stage=Stage.RUNNING,
        unread=True,
    )
