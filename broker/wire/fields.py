"""Types of message fields: what each may hold, checked where a message is decoded."""

from typing import Annotated

from msgspec import Meta

from broker.wire.ids import TOKEN_CHARS_MAX

MODEL_CHARS_MAX = 256

Token = Annotated[str, Meta(pattern=rf"^[A-Za-z0-9_-]{{1,{TOKEN_CHARS_MAX}}}\Z")]
Band = Annotated[int, Meta(ge=0, le=3)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Model = Annotated[str, Meta(min_length=1, max_length=MODEL_CHARS_MAX)]
ShortText = Annotated[str, Meta(max_length=256)]
LongText = Annotated[str, Meta(max_length=4096)]
