"""What the leading broker's file says, told so that others can compare theirs: digests, no values.

It stands in the bucket CONFIG, written by whoever leads once all of it counts. A key that is left
at its default is not in it, so that brokers of two versions whose files say the same agree.
"""

from msgspec import Struct

from broker.wire.fields import ShortText

FILE_MARK_KEY = "file"
"""Its key in the CONFIG bucket."""


class FileMark(Struct, frozen=True, kw_only=True):
    """One file, as far as all brokers must have the same."""

    values: dict[ShortText, ShortText]
    """Digest of each value that is not the default, by its key in the file."""
    topology: ShortText = ""
    """Digest of the streams, buckets and consumers that follow from it."""


def differences(ours: FileMark, theirs: FileMark) -> tuple[str, ...]:
    """Name the keys in which two files differ, sorted; empty: they say the same."""
    keys = ours.values.keys() | theirs.values.keys()
    return tuple(sorted(key for key in keys if ours.values.get(key) != theirs.values.get(key)))
