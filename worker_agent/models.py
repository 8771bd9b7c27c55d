"""Names of models: what jobs ask for, and what the engine calls the same thing."""

from collections.abc import Mapping
from typing import cast

import orjson

from broker.wire.messages import Job
from broker.wire.splice import with_fields


class ModelNames:
    """The map from served names to the engine's own; without one, the engine's are served."""

    def __init__(self, configured: Mapping[str, str]) -> None:
        self._configured = dict(configured)
        self.served: tuple[str, ...] = tuple(self._configured)
        """Names that jobs may ask for here; empty until the engine told its own."""

    def learn(self, engine_models: tuple[str, ...]) -> None:
        """Take the engine's own names, where none are configured."""
        if not self._configured:
            self.served = engine_models

    def body(self, job: Job) -> bytes:
        """Return the body for the engine: untouched if it asks for the job's model, else made to.

        The job's model is what its lane was admitted for, whatever the body says (an alias, say).
        An adapter goes by its own name in the place of the model, as vLLM takes it.
        """
        meant = job.adapter or job.model
        name = self._configured.get(meant, meant)
        try:
            fields: object = orjson.loads(job.body)
        except orjson.JSONDecodeError:
            return job.body  # The engine refuses it in its own words.
        if not isinstance(fields, dict):
            return job.body
        asked = cast("dict[str, object]", fields)
        if asked.get("model") == name:
            return job.body
        try:
            return with_fields(job.body, {"model": name})
        except RecursionError:
            return job.body  # Refused as too deep before its model is looked at.
