"""What must agree between the values of a configuration, each value being allowed by itself."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from broker.core.policy import LanePolicy, QuotaRow
from broker.service.config_bounds import check_bounds
from broker.service.config_records import Config
from broker.wire.ids import BATCH_BAND, MalformedName, escape_model, require_token
from broker.wire.prefix import CLUSTER_SCOPE
from broker.wire.settings import nearest
from broker.wire.toml_lines import KeyPath

_LISTED_MAX = 20
"""Names shown in one message."""

NAME_CHARS_MAX = 256
"""Longest name of an alias or adapter: `ShortText` on the wire."""

Finding = tuple[KeyPath, str]


def check(config: Config) -> Iterator[Finding]:
    """Find every disagreement: (key, what is wrong and what to do)."""
    yield from _named(config)
    yield from _lanes(config)
    yield from _quotas(config)
    yield from _shares(config)
    yield from _pressure(config)
    yield from _leases(config)
    yield from _breaker(config)
    yield from _broker(config)
    yield from _streams(config)
    yield from _retention(config)
    yield from check_bounds(config)


def _named(config: Config) -> Iterator[Finding]:
    policy = config.policy
    others = (config.worker, config.producer, config.gateway)
    serves = all(table is None for table in others)
    if serves or policy.lanes or policy.models:
        if not policy.models:
            yield ("policy", "models"), 'no model is named; give a list, such as models = ["tiny"]'
        if not policy.lanes:
            yield ("policy", "lanes"), "no lane is named; add a [[policy.lanes]] table with a name"
    for index, model in enumerate(policy.models):
        path = ("policy", "models", index)
        try:
            escape_model(model)
        except MalformedName:
            yield path, f"{model!r} is empty or too long for a subject (64 characters when escaped)"
    yield from _repeated(("policy", "models"), policy.models, "model")
    yield from _aliases(config)
    yield from _adapters(config)


def _aliases(config: Config) -> Iterator[Finding]:
    policy = config.policy
    adapters = [name for names in policy.adapters.values() for name in names]
    for alias, model in policy.aliases.items():
        path = ("policy", "aliases", alias)
        if not 0 < len(alias) <= NAME_CHARS_MAX:
            yield path, f"an alias has 1 to {NAME_CHARS_MAX} characters"
        if alias in policy.models:
            yield path, f'"{alias}" is a model itself; an alias needs a name of its own'
        if model in policy.aliases:
            meant = policy.aliases[model]
            message = f'"{model}" is an alias itself, of "{meant}"; name the model that is meant'
            yield path, message
        elif model not in policy.models and model not in adapters:
            what = "model or adapter" if adapters else "model"
            yield path, _no_such(what, model, (*policy.models, *adapters))


def _adapters(config: Config) -> Iterator[Finding]:
    policy = config.policy
    base: dict[str, str] = {}
    for model, adapters in policy.adapters.items():
        path = ("policy", "adapters", model)
        if model not in policy.models:
            yield path, _no_such("model", model, policy.models)
        for index, adapter in enumerate(adapters):
            if not 0 < len(adapter) <= NAME_CHARS_MAX:
                yield (*path, index), f"an adapter's name has 1 to {NAME_CHARS_MAX} characters"
            if adapter in policy.models or adapter in policy.aliases:
                what = "a model" if adapter in policy.models else "an alias"
                message = f'"{adapter}" is {what} already; an adapter needs a name of its own'
                yield (*path, index), message
            if adapter in base:
                message = f'adapter "{adapter}" was given before, of "{base[adapter]}"; keep one'
                yield (*path, index), message
            base.setdefault(adapter, model)


def _lanes(config: Config) -> Iterator[Finding]:
    policy = config.policy
    for index, lane in enumerate(policy.lanes):
        path = ("policy", "lanes", index)
        try:
            require_token(lane.name, what="lane")
        except MalformedName as error:
            yield (*path, "name"), str(error)
        if lane.name == CLUSTER_SCOPE:
            message = (
                f'no lane may be called "{CLUSTER_SCOPE}": its prompts would share the prefix'
                " cache of all lanes that opted into that scope"
            )
            yield (*path, "name"), message
        for position, model in enumerate(lane.models):
            if model not in policy.models:
                yield (*path, "models", position), _no_such("model", model, policy.models)
        yield from _repeated((*path, "models"), lane.models, "model")
        yield from _repeated((*path, "bands"), lane.bands, "band")
        if not lane.bands:
            yield (*path, "bands"), "a lane without a band can't be used; name one of 0, 1, 2, 3"
    yield from _repeated(
        ("policy", "lanes"), [lane.name for lane in policy.lanes], "lane", key="name"
    )


def _quotas(config: Config) -> Iterator[Finding]:
    policy = config.policy
    lanes = {lane.name: lane for lane in policy.lanes}
    for index, row in enumerate(policy.quotas):
        path = ("policy", "quotas", index)
        if row.lane is not None and row.lane not in lanes:
            yield (*path, "lane"), _no_such("lane", row.lane, lanes)
        if row.model is not None and row.model not in policy.models:
            yield (*path, "model"), _no_such("model", row.model, policy.models)
        if row.lane in lanes:
            yield from _never_matches(path, row, lanes[row.lane])
        if not _limits(row):
            yield (
                path,
                f'the row "{row.name}" limits nothing; give it a limit or remove it',
            )
        yield from _lending(path, row)
        if row.result_bytes_max is not None and (
            row.lane is None or row.name != f"lane={row.lane}"
        ):
            message = "results are kept by lane: the row must name a lane, and no model or band"
            yield (*path, "result_bytes_max"), message
        if row.band == BATCH_BAND and row.queued_jobs_max is not None:
            message = "batch queues are bounded by streams.batch_per_subject_max, not by a row"
            yield (*path, "queued_jobs_max"), message
    yield from _repeated(("policy", "quotas"), [row.name for row in policy.quotas], "row")
    yield from _alone(policy.quotas)


def _never_matches(path: KeyPath, row: QuotaRow, lane: LanePolicy) -> Iterator[Finding]:
    if row.band is not None and row.band not in lane.bands:
        message = f'no job can match: lane "{lane.name}" may not use band {row.band}'
        yield (*path, "band"), message
    if row.model is not None and lane.models and row.model not in lane.models:
        message = f'no job can match: lane "{lane.name}" may not use model "{row.model}"'
        yield (*path, "model"), message


def _lending(path: KeyPath, row: QuotaRow) -> Iterator[Finding]:
    if row.inflight_jobs_max is None and row.inflight_jobs_max_per_worker is None:
        for key, is_given in (
            ("lendable_share", row.lendable_share > 0),
            ("ceiling_ratio", row.ceiling_ratio > 1),
        ):
            if is_given:
                message = (
                    "needs inflight_jobs_max (or _per_worker): the seats that it is a share of"
                )
                yield (*path, key), message


def _alone(rows: Sequence[QuotaRow]) -> Iterator[Finding]:
    """Find rows that would borrow where no row of their kind lends."""
    kinds = [(row.model, row.lane is None, row.band is None) for row in rows]
    for index, row in enumerate(rows):
        others = (
            other
            for position, other in enumerate(rows)
            if position != index and kinds[position] == kinds[index]
        )
        if row.ceiling_ratio > 1 and not any(other.lendable_share for other in others):
            message = (
                f'nobody lends to "{row.name}": give another row that names the same things'
                " (lanes lend to lanes, bands to bands, of one model) a lendable_share"
            )
            yield ("policy", "quotas", index, "ceiling_ratio"), message


def _limits(row: QuotaRow) -> bool:
    limits = (
        row.inflight_jobs_max,
        row.inflight_jobs_max_per_worker,
        row.inflight_tokens_max,
        row.queued_jobs_max,
        row.tokens_per_min,
        row.result_bytes_max,
    )
    return any(limit is not None for limit in limits)


def _shares(config: Config) -> Iterator[Finding]:
    guaranteed = sum(band.guaranteed_share for band in config.policy.bands)
    if guaranteed >= 1:
        message = f"guaranteed shares add up to {guaranteed:.2f}; they must leave some: below 1"
        yield ("policy", "bands"), message
    reserved = sum(config.broker.held_reserve_ratios)
    if reserved >= 1:
        message = f"the reserves add up to {reserved:.2f}; they must leave some: below 1"
        yield ("broker", "held_reserve_ratios"), message


def _pressure(config: Config) -> Iterator[Finding]:
    pressure = config.policy.pressure
    ordered = (
        ("borrow_wait_s", pressure.borrow_wait_s),
        ("hold_batch_wait_s", pressure.hold_batch_wait_s),
        ("refuse_batch_wait_s", pressure.refuse_batch_wait_s),
    )
    for (earlier, earlier_s), (later, later_s) in pairwise(ordered):
        if later_s < earlier_s:
            message = f"{later_s:g} s must be at least {earlier} ({earlier_s:g} s): each step adds"
            yield ("policy", "pressure", later), message


def _leases(config: Config) -> Iterator[Finding]:
    leases = config.policy.leases
    ordered = (
        ("heartbeat_s", leases.heartbeat_s),
        ("lease_s", leases.lease_s),
        ("revoke_s", leases.revoke_s),
    )
    for (shorter, shorter_s), (longer, longer_s) in pairwise(ordered):
        if longer_s <= shorter_s:
            message = f"{longer_s:g} s must be longer than {shorter} ({shorter_s:g} s)"
            yield ("policy", "leases", longer), message
    if leases.retry_s_max < leases.retry_base_s:
        message = f"must be at least retry_base_s ({leases.retry_base_s:g} s)"
        yield ("policy", "leases", "retry_s_max"), message
    if leases.stall_s > leases.run_s_max:
        message = f"must be at most run_s_max ({leases.run_s_max:g} s), or it never acts"
        yield ("policy", "leases", "stall_s"), message


def _breaker(config: Config) -> Iterator[Finding]:
    breaker = config.policy.breaker
    if breaker.open_s_max < breaker.open_s:
        message = f"must be at least open_s ({breaker.open_s:g} s)"
        yield ("policy", "breaker", "open_s_max"), message


def _broker(config: Config) -> Iterator[Finding]:
    broker, nats = config.broker, config.nats
    if broker.renew_s > config.streams.ack_wait_s / 2:
        message = (
            f"must be at most half of streams.ack_wait_s ({config.streams.ack_wait_s:g} s),"
            " so that one lost renewal costs nothing"
        )
        yield ("broker", "renew_s"), message
    if nats.creds_file and (nats.user or nats.password):
        yield ("nats", "creds_file"), "give either creds_file or user and password, not both"
    if nats.password and not nats.user:
        yield ("nats", "password"), "a password needs a user beside it"


def _streams(config: Config) -> Iterator[Finding]:
    streams, broker = config.streams, config.broker
    quotas = config.policy.quotas
    inflight = max((row.inflight_jobs_max or 0 for row in quotas), default=0)
    queued = max((row.queued_jobs_max or 0 for row in quotas), default=0)
    window = max(broker.window_online_jobs, broker.window_batch_jobs)
    if streams.ack_pending_jobs_max < window + inflight:
        message = (
            f"must be at least {window + inflight:,}: the largest window ({window:,})"
            f" and the largest inflight_jobs_max ({inflight:,}) together"
        )
        yield ("streams", "ack_pending_jobs_max"), message
    if streams.jobs_per_subject_max < queued + inflight:
        message = (
            f"must be at least {queued + inflight:,}: the largest queued_jobs_max ({queued:,})"
            f" and inflight_jobs_max ({inflight:,}) together, for running jobs stay in the stream"
        )
        yield ("streams", "jobs_per_subject_max"), message


def _retention(config: Config) -> Iterator[Finding]:
    lanes = [lane.name for lane in config.policy.lanes]
    for index, kept in enumerate(config.retention):
        if kept.lane not in lanes:
            yield ("retention", index, "lane"), _no_such("lane", kept.lane, lanes)
    yield from _repeated(
        ("retention",), [kept.lane for kept in config.retention], "lane", key="lane"
    )


def _repeated(
    path: KeyPath, names: Iterable[str | int], what: str, *, key: str = ""
) -> Iterator[Finding]:
    first: dict[str | int, int] = {}
    for index, name in enumerate(names):
        if name in first:
            at = (*path, index, key) if key else (*path, index)
            yield at, f'{what} "{name}" was given before (entry {first[name]}); keep one'
        first.setdefault(name, index)


def _no_such(what: str, name: str, known: Iterable[str]) -> str:
    names = list(known)
    listed = ", ".join(names[:_LISTED_MAX]) or "none"
    return f'no such {what}: "{name}".{nearest(name, names)} Known: {listed}'
