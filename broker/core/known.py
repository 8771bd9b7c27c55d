"""What is known of a waiting job between two looks: who holds its prefix, and the last answer.

An answer stands until it could be another; `choice` says when.
"""

from msgspec import Struct

from broker.core.candidates import Holding
from broker.core.events import JobSpec
from broker.core.heat import Spread
from broker.core.placement import Placement
from broker.core.prefix_search import Level
from broker.core.roster import Pool
from broker.core.scoring import TRUST_MAX, Need, Scored
from broker.core.seat import FOREVER, Seat
from broker.core.size_intervals import NO_PULL, Pull
from broker.core.stickiness import Key


class Known(Struct, eq=False):
    """A job's holders, and its last answer with what that rests on."""

    job: JobSpec
    need: Need
    levels: list[Level]
    dated: int
    """Change of the index that `levels` is from."""
    useful: tuple[Holding, ...] = ()
    """Of the pool as it was: who holds enough to matter."""
    useful_of: int = -1
    """The pool's workers that `useful` is of."""
    excluded: tuple[str, ...] = ()
    placement: Placement | None = None
    seat: Seat | None = None
    """Chosen, or waited for."""
    stamp: int = 0
    score: float = 0.0
    wait_s: float = 0.0
    """Predicted until its prefill begins."""
    improved_count: int = 0
    until_s: float = 0.0
    """When a wait for a worker is given up."""
    spread: Spread | None = None
    """Set where its prefix is hot."""
    previous: str = ""
    """Who served the session or prefix last, and by which key that is known."""
    sticky_key: Key | None = None
    pull: Pull = NO_PULL
    """To workers with other jobs of its size."""
    is_held: bool = False
    held_since_s: float | None = None
    """When waiting for a worker began, kept when it took too long: it is not begun anew."""

    def renew(self, levels: list[Level], dated: int) -> None:
        """Take the holders as they are now; others call for another answer."""
        self.dated = dated
        if levels is not self.levels:
            self.levels = levels
            self.useful_of = -1

    def hit_tokens(self, seat: Seat) -> float:
        """Return how much of the job's prompt a worker holds, where that is enough to matter."""
        return next((one.hit_tokens for one in self.useful if one.workers & seat.bit), 0.0)

    @property
    def most_tokens_held(self) -> float:
        """How much of the prompt the worker that holds most of it has."""
        return self.useful[0].hit_tokens if self.useful else 0.0  # The deepest stands first.

    @property
    def least_tokens(self) -> int:
        """What must be computed of it at whoever holds most; more may be found than is known."""
        return max(1, self.need.prompt_tokens - int(TRUST_MAX * self.most_tokens_held))

    def is_under_way(self, one: Scored) -> bool:
        """Say whether a worker is still prefilling, for another job, what it has of this one."""
        seat = one.seat
        if not one.hit_tokens or not seat.worker.prefilling:
            return False
        held = next(holding for holding in self.useful if holding.workers & seat.bit)
        depth, blocks = held.depth_blocks, self.job.blocks
        for lease in seat.worker.prefilling.values():
            others = lease.job.blocks
            if len(others) >= depth and others[depth - 1] == blocks[depth - 1]:
                return lease.held_blocks < depth  # Of tokens either may believe more.
        return False

    def answer(self, chosen: Scored, *, held_until_s: float | None = None) -> Placement:
        """Keep an answer: to run at the chosen worker, or to wait for it until then."""
        is_held = held_until_s is not None
        self.is_held, self.until_s = is_held, held_until_s if is_held else FOREVER
        prompt_tokens = self.need.prompt_tokens
        worker = chosen.seat.worker
        self.seat, self.stamp, self.score = chosen.seat, chosen.seat.stamp, chosen.score
        self.wait_s = chosen.wait_s
        self.placement = Placement(
            None if is_held else worker,
            chosen.hit_tokens,
            prompt_tokens - chosen.hit_tokens,
            chosen.prefill_s,
            worker.id if is_held else "",
            least_tokens=self.least_tokens,
        )
        return self.placement

    def nowhere(self, pool: Pool) -> Placement:
        """Keep the answer that nobody has room."""
        self.is_held, self.until_s = False, FOREVER
        self.seat, self.stamp, self.score = None, 0, FOREVER
        prompt_tokens, least_tokens = self.need.prompt_tokens, self.least_tokens
        full = pool.is_full_for(self.job, self.need.output_tokens)
        whole = pool.whole
        self.placement = Placement(
            None,
            0,
            prompt_tokens,
            0.0,
            full=full,
            # Rooms are told by octaves: where those of batch may be as large, it lacks just room.
            confined=not full
            and whole is not None
            and pool.most_tokens <= least_tokens < whole.most_tokens,
            least_tokens=least_tokens,
        )
        return self.placement
