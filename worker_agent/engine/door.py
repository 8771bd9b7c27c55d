"""What an answer means that no engine gives to a request it takes: a wrong address or a wrong key.

Such a mistake stands in the agent's settings, and its sentence goes to whoever wrote them.
"""

from urllib.parse import urlsplit

LOCATION_CHARS_MAX = 200
"""Of where a redirect points: enough for a host and a path."""

REDIRECTS = range(300, 400)
WRONG_KEY_CODES = (401, 403)
PROXY_KEY_CODE = 407
NO_SUCH_METHOD_CODE = 405
NO_SUCH_PAGE_CODE = 404

DOOR_CODES = (*WRONG_KEY_CODES, PROXY_KEY_CODE, NO_SUCH_METHOD_CODE)
"""The worker's fault and not the job's: an engine that is set right takes the same request."""


def door_advice(status_code: int, *, location: str = "") -> str:
    """Say what to do about such an answer, to stand behind its code; "" for any other.

    `location` is where a redirect points, as the engine's side wrote it.
    """
    if status_code in REDIRECTS:
        target = _shown(location)
        points = f" to {target}" if target else ""
        return (
            f"{points}, which is not followed: a login page or a proxy stands before the engine;"
            " give the engine's own address as base_url"
        )
    if status_code in WRONG_KEY_CODES:
        return ", the engine's door is shut: give its key as api_key in [worker]"
    if status_code == PROXY_KEY_CODE:
        return ", a proxy wants a password: give the engine's own address as base_url"
    if status_code == NO_SUCH_METHOD_CODE:
        return ", nothing takes requests there: is base_url an engine's address?"
    return ""


def no_models_advice(status_code: int, *, location: str = "") -> str:
    """Say what a missing list of models means, to stand behind its code."""
    if status_code in (NO_SUCH_PAGE_CODE, NO_SUCH_METHOD_CODE):
        return ": no OpenAI API is there; is base_url right? It ends before /v1"
    return door_advice(status_code, location=location)


def _shown(location: str) -> str:
    """Write a redirect's target without what may be secret in it: user, password, query."""
    try:
        parts = urlsplit(location)
        host = parts.hostname or ""
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return ""
    if ":" in host:
        host = f"[{host}]"
    origin = f"{parts.scheme}://{host}{port}" if host else ""
    return "".join(char for char in origin + parts.path if char.isprintable())[:LOCATION_CHARS_MAX]
