"""What the broker learns from finished jobs: cached share by worker, bytes per token by model."""

from collections.abc import Mapping

from broker.wire.messages import Usage
from broker.wire.prefix import BLOCK_BYTES

WORKERS_MAX = 10_000
"""Workers whose cached share is kept; beyond it the one that ended a job longest ago goes."""

BLOCKS_MIN = 4
"""Shorter prompts teach nothing: chat templates and the partial last block weigh too much."""

WEIGHT = 0.05
"""Of a new sample in the moving average: about the last twenty jobs count."""

CHANGE_MIN = 0.05
"""A smaller change of a model's bytes per token is not worth telling the clients."""


class Learned:
    """Moving figures, from `usage` of jobs that ran."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._tokens: dict[str, tuple[int, int]] = {}
        self._bytes_per_token: dict[str, float] = {}
        self._measured: set[str] = set()
        self._told: dict[str, float] = {}

    def ran(self, worker: str, usage: Usage) -> None:
        """Note a job that ran on a worker."""
        prompt, cached = self._tokens.pop(worker, (0, 0))
        if len(self._tokens) >= WORKERS_MAX:
            del self._tokens[next(iter(self._tokens))]
        self._tokens[worker] = (prompt + usage.prompt_tokens, cached + usage.cached_tokens)

    def measured(self, model: str, *, prompt_blocks: int, prompt_tokens: int) -> None:
        """Note how many tokens a prompt of that many whole blocks made."""
        if prompt_blocks < BLOCKS_MIN or prompt_tokens <= 0:
            return
        # On average half a block is left over behind the last whole one.
        sample = (prompt_blocks + 0.5) * BLOCK_BYTES / prompt_tokens
        known = self._bytes_per_token.get(model)
        self._measured.add(model)
        self._bytes_per_token[model] = (
            sample if known is None else known + WEIGHT * (sample - known)
        )

    def prompt_tokens(self, model: str, *, prompt_blocks: int, told: int) -> int:
        """Estimate a prompt's tokens: by what its model's prompts really made, else as `told`.

        Of a short one its producer knows the bytes better. But who connected before anything was
        learned counts tokens by a guess for ever: what so many whole blocks can't be is not taken.
        """
        bytes_per_token = self._bytes_per_token.get(model)
        if bytes_per_token is None or not prompt_blocks:
            return max(1, told)
        block_tokens = BLOCK_BYTES / bytes_per_token
        if prompt_blocks < BLOCKS_MIN and 0 <= told - prompt_blocks * block_tokens <= block_tokens:
            return max(1, told)
        return max(1, round((prompt_blocks + 0.5) * block_tokens))

    def bytes_per_token_of(self, model: str) -> float | None:
        """Bytes that a token of a model's prompts takes; None while nothing was learned of it."""
        return self._bytes_per_token.get(model)

    def resume(self, told: Mapping[str, float]) -> None:
        """Go on from what clients were told by any broker, for models not measured here."""
        self._told = dict(told)
        for model, bytes_per_token in told.items():
            if model not in self._measured:
                self._bytes_per_token[model] = bytes_per_token

    def cached_token_ratio(self, worker: str) -> float:
        """Share of a worker's prompt tokens that came from its cache; 0 before its first job."""
        prompt, cached = self._tokens.get(worker, (0, 0))
        return cached / prompt if prompt else 0.0

    def news(self) -> Mapping[str, float] | None:
        """Return bytes per token by model if they differ enough from what was told, else None."""
        changed = any(
            abs(now - self._told.get(model, 0.0)) > CHANGE_MIN * now
            for model, now in self._bytes_per_token.items()
        )
        if not changed:
            return None
        return self.bytes_per_token

    @property
    def bytes_per_token(self) -> dict[str, float]:
        """Bytes per token by model, as clients should know them."""
        return {model: round(now, 4) for model, now in self._bytes_per_token.items()}

    def told(self, bytes_per_token: Mapping[str, float]) -> None:
        """Note what clients know now."""
        self._told = dict(bytes_per_token)
