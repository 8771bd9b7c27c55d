"""What engines tell of themselves beside the OpenAI API: models, slots, load. Pure.

Each known engine has other names for the same figure (read off running servers and their sources);
the first name found counts. What an engine doesn't tell stays 0, which means unknown.
"""

import re
from collections.abc import Iterator, Mapping
from typing import cast

import orjson

from broker.wire.fields import MODEL_CHARS_MAX
from broker.wire.messages import Load

Metrics = Mapping[str, list[float]]

RUNNING = (
    "llamacpp:requests_processing",
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "tgi_batch_current_size",
)
WAITING = (
    "llamacpp:requests_deferred",
    "vllm:num_requests_waiting",
    "sglang:num_queue_reqs",
    "tgi_queue_size",
)
KV_SHARE = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
    "llamacpp:kv_cache_usage_ratio",
)
"""The last one only in llama.cpp before its unified cache; it tells none since."""
KV_TOKENS_MAX = ("sglang:max_total_num_tokens",)
PREFILL = (
    ("llamacpp:prompt_tokens_total", "llamacpp:prompt_seconds_total"),
    ("vllm:request_prefill_kv_computed_tokens_sum", "vllm:request_prefill_time_seconds_sum"),
)
DECODE = (
    ("llamacpp:tokens_predicted_total", "llamacpp:tokens_predicted_seconds_total"),
    ("vllm:inter_token_latency_seconds_count", "vllm:inter_token_latency_seconds_sum"),
    ("vllm:time_per_output_token_seconds_count", "vllm:time_per_output_token_seconds_sum"),
    ("sglang:inter_token_latency_seconds_count", "sglang:inter_token_latency_seconds_sum"),
)
"""Tokens and the seconds they took, of one request: their quotient is a rate."""

RATE_DECAY = 0.7
"""Weight of what was known before at each reading: half is forgotten in two heartbeats."""

COUNT_MAX = 2**53
"""The wire's bound on a `Count`: one figure beyond it, and no broker could read the heartbeat."""

RATE_MAX = 1e8
"""Tokens a second that no engine reaches: what is said beyond it is a fault of its counters."""

COUNT_DIGITS_MAX = 15

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? ([^ ]+)", re.ASCII)
_LABEL = re.compile(r'\b(\w+)="([^"]*)"', re.ASCII)
"""Looked for where a word begins alone: from each letter on, a long word takes minutes."""


class RateMeter:
    """Tokens a second while at it, as a moving average that weighs tokens, not readings."""

    def __init__(self) -> None:
        self._seen: tuple[float, float] | None = None
        self._tokens = 0.0
        self._seconds = 0.0

    def read(self, tokens_total: float, seconds_total: float) -> float:
        """Take two counters as they stand; returns the rate, 0 while unknown."""
        seen, self._seen = self._seen or (0.0, 0.0), (tokens_total, seconds_total)
        tokens, seconds = tokens_total - seen[0], seconds_total - seen[1]
        if tokens > 0 and seconds > 0:
            self._tokens = RATE_DECAY * self._tokens + tokens
            self._seconds = RATE_DECAY * self._seconds + seconds
        rate = self._tokens / self._seconds if self._seconds else 0.0
        return rate if rate <= RATE_MAX else 0.0


class LoadReader:
    """Reads an engine's metrics page again and again."""

    def __init__(self) -> None:
        self._prefill = RateMeter()
        self._decode = RateMeter()

    def read(self, page: str, *, kv_tokens_max: int) -> Load:
        """Return the load that a page tells; `kv_tokens_max` stands in where it tells none."""
        metrics = parse_metrics(page)
        capacity = _sum(metrics, KV_TOKENS_MAX) or _vllm_kv_tokens(page) or kv_tokens_max
        shares = next((metrics[name] for name in KV_SHARE if name in metrics), [0.0])
        share = min(1.0, max(0.0, sum(shares) / len(shares)))
        return Load(
            running=_sum(metrics, RUNNING),
            waiting=_sum(metrics, WAITING),
            kv_tokens_used=round(share * capacity),
            kv_tokens_max=capacity,
            prefill_tokens_s=self._rate(self._prefill, metrics, PREFILL),
            decode_tokens_s=self._rate(self._decode, metrics, DECODE),
        )

    @staticmethod
    def _rate(meter: RateMeter, metrics: Metrics, pairs: tuple[tuple[str, str], ...]) -> float:
        for tokens, seconds in pairs:
            if tokens in metrics and seconds in metrics:
                return meter.read(sum(metrics[tokens]), sum(metrics[seconds]))
        return 0.0


def parse_metrics(page: str) -> dict[str, list[float]]:
    """Parse the Prometheus text format: each name's values, one for each set of labels.

    What no engine can mean (negative, infinite, beyond all counting) is not said.
    """
    metrics: dict[str, list[float]] = {}
    for name, _, value in _samples(page):
        if 0.0 <= value <= COUNT_MAX:
            metrics.setdefault(name, []).append(value)
    return metrics


def tokens_total(metrics: Metrics) -> float | None:
    """Return all tokens counted since the engine's start: if it falls, the engine is another.

    None where the page counts none: an empty page, or a stranger's, says nothing of the engine.
    """
    counters = [name for name in metrics if "tokens" in name and name.endswith("_total")]
    return sum(sum(metrics[name]) for name in counters) if counters else None


def models_in(body: bytes) -> tuple[str, ...]:
    """Return the names that a /v1/models answer lists, aliases included.

    Names that no job could ask for are left out: with one of them no broker reads the heartbeat.
    """
    names: list[str] = []
    for entry in _list_in(_json(body), "data"):
        if isinstance(name := entry.get("id"), str):
            names.append(name)
        aliases = entry.get("aliases")
        if isinstance(aliases, list):
            names.extend(a for a in cast("list[object]", aliases) if isinstance(a, str))
    return tuple(name for name in dict.fromkeys(names) if 0 < len(name) <= MODEL_CHARS_MAX)


def takes_any_model(body: bytes) -> bool:
    """Tell by a /v1/models answer whether the engine ignores a request's model (llama.cpp)."""
    entries = _list_in(_json(body), "data")
    return any(entry.get("owned_by") == "llamacpp" for entry in entries)


def slots_in(body: bytes) -> tuple[int, int]:
    """Return the slots, and the KV tokens of all of them, of a llama.cpp /props answer; else 0."""
    props = _json(body)
    slots = props.get("total_slots")
    settings = props.get("default_generation_settings")
    context = cast("dict[str, object]", settings).get("n_ctx") if isinstance(settings, dict) else 0
    if not isinstance(slots, int) or not 1 <= slots <= COUNT_MAX:
        return 0, 0
    tokens = slots * context if isinstance(context, int) and context > 0 else 0
    return slots, tokens if tokens <= COUNT_MAX else 0


def _samples(page: str) -> Iterator[tuple[str, str, float]]:
    for line in page.splitlines():
        # Most of a page are steps of histograms, and none of them is asked for.
        if "_bucket{" not in line and (sample := _SAMPLE.match(line)):
            name, labels, value = sample.groups()
            try:
                yield name, labels or "", float(value)
            except ValueError:
                continue


def _vllm_kv_tokens(page: str) -> int:
    """Add up the caches of all engines behind the page, as their running requests are added up."""
    tokens = 0
    for name, labels, _ in _samples(page):
        if name == "vllm:cache_config_info":
            config = dict(cast("list[tuple[str, str]]", _LABEL.findall(labels)))
            blocks, size = config.get("num_gpu_blocks", ""), config.get("block_size", "")
            tokens += _count(blocks) * _count(size)
    return tokens if tokens <= COUNT_MAX else 0


def _count(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) <= COUNT_DIGITS_MAX else 0


def _sum(metrics: Metrics, names: tuple[str, ...]) -> int:
    total = next((sum(metrics[name]) for name in names if name in metrics), 0.0)
    return int(total) if total <= COUNT_MAX else 0


def _json(body: bytes) -> dict[str, object]:
    try:
        parsed: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return cast("dict[str, object]", parsed) if isinstance(parsed, dict) else {}


def _list_in(parsed: dict[str, object], name: str) -> list[dict[str, object]]:
    entries = parsed.get(name)
    if not isinstance(entries, list):
        return []
    found = cast("list[object]", entries)
    return [cast("dict[str, object]", entry) for entry in found if isinstance(entry, dict)]
