"""What `doctor` says of a server where no broker has run yet: what a first start needs. Pure.

The server sets a stream's bytes aside when it is made, full or empty: a disk or a `max_file`
without that room refuses the broker's first start.
"""

from broker.bus import topology
from broker.wire.ids import BANDS
from ops.cli.doctor_facts import Facts, wanted_streams
from ops.cli.doctor_findings import Finding, ok, warn
from ops.cli.output import size

LOWER = "lower the bounds of [streams] (files_bytes_max, batch_bytes_max, results_bytes_max)"


def first_start(facts: Facts) -> Finding:
    """Judge whether the streams that a first start makes have room."""
    specs = wanted_streams(facts)
    lanes = len(facts.config.policy.lanes) if facts.config is not None else 0
    whose = f"for {lanes} lane{'' if lanes == 1 else 's'}"
    if not lanes:
        # By the file that ships, of one lane: what a newcomer starts with.
        specs = topology.of([topology.LanePlan("main", ("tiny",), BANDS)]).streams
        whose = "for each lane, as [streams] ships (--config FILE has your own)"
    wanted = sum(spec.max_bytes_least or max(0, spec.max_bytes) for spec in specs)
    spare = sum(spec.max_bytes - spec.max_bytes_least for spec in specs if spec.max_bytes_least)
    found = (
        f"no stream is there yet; a broker's first start sets {size(wanted)} aside {whose}, and up"
        f" to {size(spare)} more for files where there is room"
    )
    limit, free = facts.durability.storage_bytes_max, facts.disk_free_bytes
    if limit is not None and limit < wanted:
        to_do = f"raise `max_file` of the server, or {LOWER}"
        return warn("disk", f"{found}, and the server allows {size(limit)}", to_do)
    if free is None:
        return ok("disk", f"{found}; free space not known (--monitor, on the server's host)")
    if free < wanted:
        where = facts.durability.store_dir
        to_do = f"make room in {where}, or {LOWER}"
        return warn("disk", f"{found}, and the disk has {size(free)} free", to_do)
    return ok("disk", f"{found}; {size(free)} are free")
