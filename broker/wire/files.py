"""What is known of a stored file. Its content stands in chunks (`subjects.file_chunks`)."""

from broker.wire.fields import Count, Seconds, ShortText, Token
from broker.wire.messages import Record

FILENAME_CHARS_MAX = 256


def filename(name: str) -> str:
    """Fit a name for `FileInfo`: cut, and a ? for what is no text (bytes of an old encoding)."""
    return name.encode(errors="replace").decode()[:FILENAME_CHARS_MAX]


class FileInfo(Record, frozen=True, kw_only=True):
    """A file of a lane: the value of its key in the FILES bucket. Without it there is no file."""

    id: Token
    lane: Token
    filename: ShortText = ""
    purpose: ShortText = "batch"
    created_at_s: Seconds = 0.0
    expires_at_s: Seconds = 0.0
    """Gone from then on; 0: when the lane's files leave by themselves."""
    bytes: Count = 0
    lines: Count = 0
    """Ends of lines in it, a last line without one included."""
    growing: bool = False
    """Somebody still appends to it: `bytes` and `lines` are those at its beginning."""
