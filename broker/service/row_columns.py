"""What quota rows may bound beside jobs: columns for whoever shows rows, where one has a bound."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from broker.service.snapshot import RowView


@dataclass(frozen=True, slots=True)
class Bounded:
    """Two columns: what is used, and of how much."""

    head: str
    limit_head: str
    used: Callable[[RowView], float]
    limit: Callable[[RowView], int | None]
    """None: this row does not bound it."""
    is_bytes: bool = False

    def cells(
        self, row: RowView, *, size: Callable[[int], str], none: str = "–"
    ) -> tuple[str, str]:
        """Write both; `none` twice where the row does not bound it."""
        limit = self.limit(row)
        if limit is None:
            return none, none
        if self.is_bytes:
            return size(int(self.used(row))), size(limit)
        return f"{self.used(row):,.0f}", f"{limit:,}"


COLUMNS = (
    Bounded("waiting", "of", lambda row: row.queued_jobs, lambda row: row.queued_jobs_max),
    Bounded("tokens", "of", lambda row: row.inflight_tokens, lambda row: row.inflight_tokens_max),
    Bounded("may start", "a minute", lambda row: row.bucket_tokens, lambda row: row.tokens_per_min),
    Bounded(
        "results",
        "of",
        lambda row: row.result_bytes,
        lambda row: row.result_bytes_max,
        is_bytes=True,
    ),
)


def columns_of(rows: Iterable[RowView]) -> list[Bounded]:
    """Choose the columns that some of the rows bound."""
    shown = list(rows)
    return [one for one in COLUMNS if any(one.limit(row) is not None for row in shown)]
