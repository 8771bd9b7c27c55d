"""How batches are run: `[batches]` of the one TOML file. Durations in seconds."""

from typing import Annotated

from msgspec import Meta, Struct

from producers.config import AtLeastOne, Positive


class BatchesConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one gateway process does for batches."""

    batches_running_max: Annotated[int, Meta(ge=0, le=64)] = 2
    """Batches of this process at once; 0: it runs none. Each takes up to 60 MB."""
    lines_inflight_max: AtLeastOne = 1000
    """Jobs of a batch in the cluster at once: enough for ten workers of twenty slots five times
    over, so that the broker can choose among lines that share a prefix."""
    lines_waiting_max: AtLeastOne = 384
    """Of these, those that wait for their start, of all batches of a lane together: fewer than the
    broker looks at (`window_batch_jobs`, 512), so that it sees a new batch's lines at once."""
    inflight_bytes_max: AtLeastOne = 32_000_000
    """Their bodies."""
    lookahead_lines: AtLeastOne = 2048
    """Lines read ahead, so that those that share a prefix can be put together; ..."""
    lookahead_bytes_max: AtLeastOne = 8_000_000
    """... and their bytes. One such window is submitted while the next is read."""
    unwritten_bytes_max: AtLeastOne = 4_000_000
    """Results that wait to be stored, 16 chunks; then no further job is taken out of flight."""
    write_s: Positive = 1.0
    """Results are stored this often at the least: so old is what can be read while a batch runs."""
    progress_s: Positive = 1.0
    """Between two notes of a batch's counts, while they change."""
    lease_s: Positive = 15.0
    """A runner that isn't heard for so long has lost its batches: three renewals must fail."""
    scan_s: Positive = 5.0
    """Between two looks for batches that nobody runs; new ones are heard of at once."""
    grace_s: Positive = 10.0
    """After a cancellation or the window's end the cluster has so long to say itself which lines
    ended; then those that it said nothing of are closed."""
    clear_after_s: Positive = 1.0
    """A record leaves RESULTS so long after its line stands: by then its job's message was
    acknowledged, which saves a look."""
    clear_s_max: Positive = 120.0
    """How long after a batch's end its last records are waited for to leave RESULTS (the accounts
    must have them, up to 30 s behind where a broker is busy); what is left goes by its age."""
    retry_s_max: Positive = 60.0
    """Longest pause before a batch is taken up again at which a runner failed."""
    lane_gone_s: Positive = 600.0
    """Batches of a lane that was taken out of the configuration fail after this: time to put back
    what was taken out by mistake."""
    sweep_s: Positive = 600.0
    """Between two looks for files that are expired, and chunks of files that never came whole."""
    census_s: Positive = 15.0
    """Between two counts of all batches and files, for /metrics: what Prometheus usually asks."""
    file_bytes_max: Annotated[int, Meta(ge=1)] = 8_000_000_000
    """Largest file, where the lane has room for it ([streams] files_bytes_max); the hosted API
    takes 200 MB."""
