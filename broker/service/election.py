"""Who leads: one key, created to win, renewed by revision, with a life of its own.

Safety rests on time only for liveness: what an old leader may still do is fenced by the epoch at
the agents and by
compare-and-set at the records. Stepping down at 0.8 T keeps two leaders from dispatching at once in
practice.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from broker.bus.base import Bus, BusError, LinkDown, NoStream, NotFound, Timeout, WrongSequence
from broker.wire.codec import MalformedMessage, decode, encode
from broker.wire.messages import Leader
from broker.wire.subjects import LEADER_BUCKET, LEADER_KEY

RENEW_SHARE = 1 / 3
"""Renew each T/3: two tries may fail before the key is lost."""

STEP_DOWN_SHARE = 0.8
"""Stop leading after 0.8 T without a successful renewal: before the server frees the key."""

STUCK_LIVES = 2
"""A key that stands unrenewed for twice its life is nobody's: the server frees it after one."""

POLL_S_MAX = 0.25
"""How often a candidate looks whether the key is free; a lone broker serves within T + 1 s of a
crash."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Term:
    """One leadership."""

    epoch: int


@dataclass(slots=True)
class _Seen:
    """What a candidate saw of the key that it can't have."""

    revision: int | None = None
    """At which it stands; None: it can't be made."""
    since_s: float = 0.0
    """Since when nothing about it has changed."""
    look_at_s: float = 0.0
    """When it is worth a look again."""
    stuck: str = ""


async def leader_now(bus: Bus) -> tuple[Leader, int] | None:
    """Read who leads and its epoch; None when nobody does. Raises Timeout, LinkDown."""
    try:
        entry = await bus.kv_get(LEADER_BUCKET, LEADER_KEY)
    except NotFound:
        return None
    try:
        leader = decode(entry.value, Leader)
    except MalformedMessage:
        return None
    return leader, leader.epoch or entry.revision


class Election:
    """Wins, keeps and gives up the leader key."""

    def __init__(
        self,
        bus: Bus,
        *,
        broker: str,
        ttl_s: float,
        now: Callable[[], float],
        make_bucket: Callable[[], Awaitable[None]] | None = None,
        known_epoch: Callable[[], int] = lambda: 0,
    ) -> None:
        """Stand for election as `broker`, with a key that lives `ttl_s` (T) unrenewed.

        `make_bucket` makes the key's bucket, should it be gone; `known_epoch` tells the highest
        that workers know of.
        """
        self._bus = bus
        self._make_bucket = make_bucket
        self._known_epoch = known_epoch
        self._broker = broker
        self._ttl_s = ttl_s
        self._now = now
        self._revision = 0
        self._term = Term(epoch=0)
        self._write_s = 0.0
        self._writing_since_s: float | None = None
        self._seen = _Seen()
        self._no_bucket_since_s: float | None = None

    @property
    def stuck(self) -> str:
        """Why nobody can lead, however long they wait; empty: somebody leads, or soon will.

        A server whose disk was full neither stores a renewal nor frees the key, also when there is
        room again: it takes up writing only when it is started anew.
        """
        return self._seen.stuck

    @property
    def write_s(self) -> float:
        """Seconds that the last renewal of the key took, or the one under way has taken so far.

        It is a small write like any other, so it tells how the server's disk is; 0 while another
        leads.
        """
        if self._writing_since_s is None:
            return self._write_s
        return max(self._write_s, self._now() - self._writing_since_s)

    async def win(self) -> Term:
        """Wait until the key is ours."""
        self._seen = _Seen(since_s=self._now())
        self._no_bucket_since_s = None
        while True:
            try:
                revision = await self._bus.kv_create(
                    LEADER_BUCKET,
                    LEADER_KEY,
                    encode(Leader(broker=self._broker)),
                    ttl_s=self._ttl_s,
                )
            except WrongSequence:
                self._no_bucket_since_s = None
                await self._look_at_key()
                await asyncio.sleep(min(POLL_S_MAX, self._ttl_s / 10))
            except BusError as error:
                _log.warning("election.bus_unavailable", error=str(error))
                if not isinstance(error, LinkDown):
                    text = f"the message server stores no leader's key ({error})"
                    self._look(None, text, at_s=self._now())
                await self._bucket_again(is_gone=isinstance(error, NoStream))
                await asyncio.sleep(POLL_S_MAX)
            else:
                self._seen = _Seen()
                self._revision = revision
                self._term = Term(epoch=self._epoch_at(revision))
                _log.info("election.won", epoch=self._term.epoch)
                return self._term

    def _epoch_at(self, revision: int) -> int:
        """Number a leadership whose key was created at `revision`.

        A server that lost its store counts from 1 again, and workers take no order of an epoch
        below one that they know.
        """
        known = max(self._term.epoch, self._known_epoch())
        return revision if revision > known else known + revision

    async def _bucket_again(self, *, is_gone: bool) -> None:
        """Make the key's bucket where none was there for a life of the key.

        Sooner the server may only be choosing a leader for it.
        """
        if not is_gone or self._make_bucket is None:
            self._no_bucket_since_s = None
            return
        if self._no_bucket_since_s is None:
            self._no_bucket_since_s = self._now()
        if self._now() < self._no_bucket_since_s + self._ttl_s:
            return
        try:
            await self._make_bucket()
        except BusError as error:
            _log.warning("election.bucket_not_made", error=str(error))
        else:
            _log.error("election.bucket_made_anew", bucket=LEADER_BUCKET)

    async def _look_at_key(self) -> None:
        """See whether the key that another has is renewed: each life of it once."""
        at_s = self._now()
        if at_s < self._seen.look_at_s:
            return
        self._seen.look_at_s = at_s + self._ttl_s
        try:
            entry = await self._bus.kv_get(LEADER_BUCKET, LEADER_KEY)
        except BusError:
            return  # Free meanwhile, or the link is down: told by the next try.
        text = "the leader's key is neither renewed nor freed: the message server stores nothing"
        self._look(entry.revision, text, at_s=at_s)

    def _look(self, revision: int | None, trouble: str, *, at_s: float) -> None:
        seen = self._seen
        if revision != seen.revision:
            self._seen = _Seen(revision, since_s=at_s, look_at_s=seen.look_at_s)
        elif at_s >= seen.since_s + STUCK_LIVES * self._ttl_s:
            if not seen.stuck:
                _log.error("election.stuck", trouble=trouble)
            seen.stuck = f"{trouble}; if its disk was full, make room and start it anew"

    async def keep(self, term: Term) -> None:
        """Renew the key; return when leadership is lost (or may be, at 0.8 T without a renewal)."""
        renewed_at_s = self._now()
        value = encode(Leader(broker=self._broker, epoch=term.epoch))
        while True:
            started_at_s = self._now()
            left_s = renewed_at_s + STEP_DOWN_SHARE * self._ttl_s - started_at_s
            if left_s <= 0:
                _log.warning("election.stepping_down", epoch=term.epoch, cause="no renewal in time")
                return
            self._writing_since_s = started_at_s
            try:
                async with asyncio.timeout(left_s):
                    self._revision = await self._bus.kv_update(
                        LEADER_BUCKET,
                        LEADER_KEY,
                        value,
                        revision=self._revision,
                        ttl_s=self._ttl_s,
                    )
            except WrongSequence:
                if not await self._still_ours(term):
                    _log.warning("election.lost", epoch=term.epoch, cause="another revision stands")
                    return
            except (LinkDown, Timeout, TimeoutError) as error:
                _log.warning("election.renewal_failed", epoch=term.epoch, error=str(error))
            except BusError as error:
                _log.warning("election.renewal_failed", epoch=term.epoch, error=str(error))
            else:
                renewed_at_s = started_at_s
            finally:
                self._write_s = self._now() - started_at_s
                self._writing_since_s = None
            await asyncio.sleep(min(self._ttl_s * RENEW_SHARE, max(left_s / 4, 0.01)))

    async def resign(self) -> None:
        """Free the key at once, so that a successor needn't wait for it to run out."""
        self._write_s = 0.0
        try:
            await self._free_key()
        except WrongSequence:
            await self._free_renewed_key()
        except BusError as error:
            _log.warning("election.resign_failed", error=str(error))

    async def _free_renewed_key(self) -> None:
        """Free it where a renewal was stored that this stop cut short of its answer."""
        if not await self._still_ours(self._term):
            return
        try:
            await self._free_key()
        except BusError as error:
            _log.warning("election.resign_failed", error=str(error))

    async def _free_key(self) -> None:
        await self._bus.kv_delete(LEADER_BUCKET, LEADER_KEY, revision=self._revision)

    async def _still_ours(self, term: Term) -> bool:
        """Look whether a renewal of ours was stored though its answer was lost."""
        try:
            entry = await self._bus.kv_get(LEADER_BUCKET, LEADER_KEY)
            leader = decode(entry.value, Leader)
        except (NotFound, MalformedMessage):
            return False
        except BusError:
            return True
        if leader.broker != self._broker or leader.epoch != term.epoch:
            return False
        self._revision = entry.revision
        return True
