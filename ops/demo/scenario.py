"""The demo's load, made from its data file: the same bytes at the same times for every policy."""

import random
import tomllib
from dataclasses import dataclass
from pathlib import Path

import msgspec
import orjson

SCENARIO = Path(__file__).with_name("scenario.toml")

_WORDS = (
    "answer",
    "ask",
    "assist",
    "billing",
    "careful",
    "case",
    "check",
    "clear",
    "client",
    "close",
    "code",
    "company",
    "contract",
    "cost",
    "customer",
    "data",
    "date",
    "detail",
    "error",
    "explain",
    "file",
    "find",
    "first",
    "follow",
    "friendly",
    "help",
    "invoice",
    "issue",
    "keep",
    "know",
    "language",
    "law",
    "learn",
    "list",
    "mail",
    "measure",
    "meet",
    "message",
    "model",
    "need",
    "never",
    "note",
    "offer",
    "open",
    "order",
    "page",
    "part",
    "pay",
    "phone",
    "place",
    "plan",
    "please",
    "policy",
    "price",
    "product",
    "promise",
    "question",
    "quote",
    "read",
    "reason",
    "record",
    "refund",
    "reply",
    "report",
    "rule",
    "safe",
    "send",
    "serve",
    "ship",
    "short",
    "show",
    "sign",
    "speak",
    "stock",
    "store",
    "team",
    "tell",
    "term",
    "text",
    "thank",
    "ticket",
    "time",
    "tone",
    "track",
    "true",
    "update",
    "use",
    "user",
    "value",
    "wait",
    "week",
    "work",
    "write",
)


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the data file says."""

    seed: int
    workers: int
    slots: int
    system_prompts: int
    system_prompt_tokens: int
    question_tokens: int
    requests: int
    requests_per_s: float
    batch_share: float
    chat_output_tokens: int
    batch_output_tokens: int
    batch_concurrency: int


@dataclass(frozen=True, slots=True)
class Chat:
    """One online request: streamed, at its time."""

    at_s: float
    body: bytes


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """All requests of a run."""

    chats: tuple[Chat, ...]
    batch_lines: tuple[bytes, ...]
    """JSONL, as `inferlane batch run` reads it."""

    @property
    def requests(self) -> int:
        """Count both kinds."""
        return len(self.chats) + len(self.batch_lines)


def load_scenario(path: Path = SCENARIO) -> Scenario:
    """Read a scenario file. Raises msgspec.ValidationError, OSError."""
    return msgspec.convert(tomllib.loads(path.read_text()), Scenario)


def plan_load(scenario: Scenario, *, model: str, bytes_per_token: float) -> LoadPlan:
    """Make the requests. `bytes_per_token`: 1 for the tiny model, 4 for a usual one."""
    rng = random.Random(scenario.seed)
    words = random.Random(scenario.seed + 1)  # Apart, so that longer texts don't shift arrivals.
    prompts = [
        _text(words, int(scenario.system_prompt_tokens * bytes_per_token))
        for _ in range(scenario.system_prompts)
    ]
    chats: list[Chat] = []
    lines: list[bytes] = []
    at_s = 0.0
    for number in range(scenario.requests):
        at_s += rng.expovariate(scenario.requests_per_s)
        system = rng.choice(prompts)
        question = _text(words, int(scenario.question_tokens * bytes_per_token))
        is_batch = rng.random() < scenario.batch_share
        tokens = scenario.batch_output_tokens if is_batch else scenario.chat_output_tokens
        body: dict[str, object] = {
            "model": model,
            "messages": [
                {"role": "system", "content": system},
                {"role": "user", "content": question},
            ],
            "max_tokens": tokens,
        }
        if is_batch:
            lines.append(_batch_line(number, body))
        else:
            chats.append(Chat(at_s, orjson.dumps({**body, "stream": True})))
    return LoadPlan(tuple(chats), tuple(lines))


def _batch_line(number: int, body: dict[str, object]) -> bytes:
    line = {
        "custom_id": f"line-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body,
    }
    return orjson.dumps(line)


def _text(rng: random.Random, size_bytes: int) -> str:
    """Make ASCII text of exactly `size_bytes` bytes."""
    words: list[str] = []
    size = 0
    while size <= size_bytes:
        word = rng.choice(_WORDS)
        words.append(word)
        size += len(word) + 1
    return " ".join(words)[:size_bytes]
