"""What logged prompts share, down to what engines were seen to serve between two logged blocks."""

from array import array

from broker.sim.decisions import LoggedJob
from broker.sim.logged_prefixes import LoggedPrefixes
from broker.wire.prefix import pack_hashes


def a_job(*blocks: int, tokens: int = 2_064, cached: int = 0, name: str = "j") -> LoggedJob:
    """A prompt of 32 wire blocks of 64 tokens, as the demo's: logged blocks have 508 tokens."""
    return LoggedJob(
        key=f"acme.{name}",
        lane="acme",
        band=1,
        model="tiny",
        enqueued_at_s=0.0,
        prompt_blocks=tokens // 64,
        has_prefix=True,
        packed_blocks=pack_hashes(array("Q", blocks)),
        counted_prompt_tokens=tokens,
        cached_tokens=cached,
    )


def common(one: list[int], two: list[int]) -> int:
    """Count the equal blocks that both begin with."""
    same = (place for place, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1])
    return next(same, min(len(one), len(two)))


def test_whole_blocks_are_enough_where_they_tell_all() -> None:
    """Nothing was served between two logged blocks: each is one block."""
    jobs = [a_job(1, 2, 3, 4), a_job(1, 2, 3, 5, cached=3 * 508)]
    prefixes = LoggedPrefixes(jobs)
    assert not prefixes.is_split
    assert prefixes.block_tokens == 508
    assert [prefixes.of(job) for job in jobs] == [[0, 1, 2, 3], [0, 1, 2, 4]]


def test_what_was_served_between_blocks_is_shared() -> None:
    """31 of 32 wire blocks are common: prompts share 24 by their logged blocks, and 7 after them.

    One that nothing of was served for shares them, too: it was the first, or elsewhere.
    """
    jobs = [a_job(1, 2, 3, 4), a_job(1, 2, 3, 5, cached=1_984), a_job(1, 2, 3, 6)]
    prefixes = LoggedPrefixes(jobs)
    assert prefixes.is_split
    assert prefixes.block_tokens == 63
    one, two, three = (prefixes.of(job) for job in jobs)
    assert (len(one), common(one, two), common(two, three)) == (32, 31, 31)


def test_other_prefixes_do_not_share_it() -> None:
    """What follows another logged block is another thing."""
    jobs = [a_job(1, 2, 3, 4), a_job(1, 2, 3, 5, cached=1_984), a_job(1, 2, 7, 8)]
    prefixes = LoggedPrefixes(jobs)
    assert common(prefixes.of(jobs[0]), prefixes.of(jobs[2])) == 16


def test_prompt_that_ends_between_blocks() -> None:
    """It shares as much of what follows as it has."""
    jobs = [a_job(1, 2, 3, 4), a_job(1, 2, 3, 5, cached=1_984), a_job(1, 2, 3, tokens=1_750)]
    prefixes = LoggedPrefixes(jobs)
    short = prefixes.of(jobs[2])
    assert len(short) * prefixes.block_tokens <= 1_750
    assert common(short, prefixes.of(jobs[0])) == len(short) == 27


def test_half_a_hit_in_a_block_that_both_have() -> None:
    """It was evicted in between: that says nothing of what else shares the block before it."""
    jobs = [a_job(1, 2, 3, 4), a_job(1, 2, 3, 4, cached=1_900), a_job(1, 2, 3, 5)]
    prefixes = LoggedPrefixes(jobs)
    assert common(prefixes.of(jobs[0]), prefixes.of(jobs[2])) == 24


def test_no_jobs() -> None:
    """Nothing to share."""
    assert LoggedPrefixes([]).block_tokens == 1
