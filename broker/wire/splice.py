"""Fields put into a JSON object whose other fields stay as they were written, to the byte.

Read and written again they would not: numbers beyond 64 bits become floats, and floats lose the
digits beyond theirs.
"""

from collections.abc import Mapping

import msgspec

_objects = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encoder = msgspec.json.Encoder()


def with_fields(body: bytes, fields: Mapping[str, object]) -> bytes:
    """Return an object with these fields, which take the place of those of the same name.

    Raises msgspec.DecodeError for no object, RecursionError for one that is nested too deeply.
    """
    return _encoder.encode({**_objects.decode(body), **fields})
