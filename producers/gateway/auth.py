"""Who asks: a bearer key tells the caller, his lane and the priority of what he asks for."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from producers.gateway.config import KeyConfig
from producers.gateway.errors import ApiError

_SCHEME = "bearer"

_HOW = "send it as `Authorization: Bearer KEY`"


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is."""

    name: str
    """Of his key, as the configuration has it."""
    lane: str
    band: int
    """Of requests that name none."""


class Keys:
    """The keys that are known. Only their digests are held."""

    def __init__(self, keys: Mapping[str, KeyConfig]) -> None:
        self._callers = {
            _digest_of(entry): Caller(name=name, lane=entry.lane, band=entry.band)
            for name, entry in keys.items()
        }

    @property
    def lanes(self) -> tuple[str, ...]:
        """Lanes that some key belongs to, sorted."""
        return tuple(sorted({caller.lane for caller in self._callers.values()}))

    def caller(self, authorization: str | None) -> Caller:
        """Return whose request carries this `Authorization` header. Raises ApiError (401).

        Digests are compared, so the time it takes tells nothing of a key.
        """
        if not authorization:
            raise ApiError(401, "missing_api_key", f"No API key was sent; {_HOW}.")
        scheme, _, key = authorization.partition(" ")
        caller = self._callers.get(_digest(key.strip()))
        if scheme.lower() != _SCHEME or caller is None:
            raise ApiError(401, "invalid_api_key", f"This API key is not known here; {_HOW}.")
        return caller


def _digest_of(entry: KeyConfig) -> bytes:
    return bytes.fromhex(entry.key_sha256) if entry.key_sha256 else _digest(entry.key)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
