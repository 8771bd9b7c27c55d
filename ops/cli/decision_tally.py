"""What a decision log lacked, in words: the same wherever one is read."""

from collections.abc import Iterable

from broker.sim.decisions import Tally


def left_out(tally: Tally, *others: tuple[int, str]) -> list[str]:
    """Say what could not be used, a part of a sentence for each; empty when all could.

    `others` go before: what only the reader knows of, counts and their words.
    """
    counts: Iterable[tuple[int, str]] = (
        *others,
        (tally.without_end, "without an end"),
        (tally.without_dispatch, "without a dispatch"),
        (tally.outdated_lines, "dispatched by a broker too old to log what jobs ask for"),
        (tally.broken_lines, "lines that can't be read"),
    )
    return [f"{count:,} {what}" for count, what in counts if count]


def nothing_usable(tally: Tally) -> str:
    """Say why a log gave no job at all, and what to do."""
    if tally.outdated_lines:
        return (
            f"none of {tally.outdated_lines:,} dispatches says what its job asked for: the broker "
            "that wrote this log is too old. inferlane 0.1.0 and later write `enqueued_at_s`, "
            "`prompt_tokens` and (with decision_log_prefixes = true, the default) `blocks`; start "
            "the broker anew on it, and take what it logs from then on"
        )
    if tally.lines == tally.broken_lines:
        return (
            "no line of a decision log in it; brokers write decisions.jsonl into their state_dir "
            "unless decision_log_bytes_max is 0"
        )
    return (
        f"no job has both its dispatch and its end in {tally.lines:,} lines "
        f"({', '.join(left_out(tally))}): give all files of the log of that time"
    )
