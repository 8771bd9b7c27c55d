"""The engine model against a peer's published replay of a public trace, by round robin."""

import os
from collections.abc import Iterable
from pathlib import Path

import orjson
import pytest

from broker.engine_model.events import EngineEvent, Finished, FirstToken, SequenceRequest
from broker.engine_model.model import EngineModel
from broker.engine_model.profile import REFERENCE

TRACE = "mooncake/conversation_trace.jsonl"
WORKERS = 8

MEASURED = {
    1: {"share": 0.081, "mean": 326, "p50": 185, "p90": 707, "p99": 2081, "e2e": 2928},
    3: {"share": 0.081, "mean": 397, "p50": 231, "p90": 891, "p99": 2450, "e2e": 5646},
    5: {"share": 0.080, "mean": 723, "p50": 376, "p90": 1839, "p99": 4483, "e2e": 16192},
}
"""By arrival speed: cached share, TTFT and end to end in ms. Dynamo 1.4.2, offline replay."""


class Tally:
    """What came of all requests."""

    def __init__(self) -> None:
        self.started_s: dict[str, float] = {}
        self.ttft_s: list[float] = []
        self.e2e_s: list[float] = []
        self.cached_tokens = 0
        self.prompt_tokens = 0

    def add(self, events: Iterable[EngineEvent]) -> None:
        """Count what happened."""
        for event in events:
            age_s = event.at_s - self.started_s[event.request_id]
            match event:
                case FirstToken():
                    self.ttft_s.append(age_s)
                case Finished(usage=usage):
                    self.e2e_s.append(age_s)
                    self.cached_tokens += usage.cached_tokens
                    self.prompt_tokens += usage.prompt_tokens
                case _:
                    pass

    def figures(self) -> dict[str, float]:
        """The table's figures."""
        ordered = sorted(self.ttft_s)
        percentile = {p: 1000 * ordered[int(p / 100 * len(ordered))] for p in (50, 90, 99)}
        return {
            "share": self.cached_tokens / self.prompt_tokens,
            "mean": 1000 * sum(ordered) / len(ordered),
            "p50": percentile[50],
            "p90": percentile[90],
            "p99": percentile[99],
            "e2e": 1000 * sum(self.e2e_s) / len(self.e2e_s),
        }


@pytest.mark.trace(TRACE)
@pytest.mark.parametrize("speed", MEASURED)
def test_round_robin_on_the_conversation_trace(speed: int) -> None:
    """Eight modelled engines behind a round robin give the measured figures, each within 3 %."""
    lines = (Path(os.environ.get("INFERLANE_TRACES", "traces")) / TRACE).read_bytes().splitlines()
    models = [EngineModel(REFERENCE) for _ in range(WORKERS)]
    tally = Tally()
    for index, line in enumerate(lines):
        row = orjson.loads(line)
        at_s = row["timestamp"] / 1000 / speed
        prompt_tokens = row["input_length"]
        request = SequenceRequest(
            request_id=f"{index}",
            prompt_tokens=prompt_tokens,
            output_tokens=max(1, row["output_length"]),
            blocks=row["hash_ids"][: prompt_tokens // REFERENCE.block_tokens],
        )
        model = models[index % WORKERS]
        tally.add(model.advance(at_s))
        tally.started_s[request.request_id] = at_s
        model.submit(request, at_s)
    for model in models:
        tally.add(model.advance(1e9))
    assert len(tally.e2e_s) == len(lines)
    assert tally.figures() == pytest.approx(MEASURED[speed], rel=0.03)
