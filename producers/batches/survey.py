"""Looks an input over before it is run: how many lines it has, and whether any can run at all.

A bad line is one error line of its batch and stops nothing. Only an input of which no line can run
fails its batch, with what is wrong with its lines.
"""

from dataclasses import dataclass, field

import msgspec

from broker.wire.messages import LaneOffer
from producers.batch.lines import BadLine, Code, Request, bad, parse_line
from producers.batch.source import Line
from producers.batches.life import FAULTS_MAX
from producers.batches.records import Fault
from producers.naming import resolve


class _Model(msgspec.Struct):
    model: str = ""


_models = msgspec.json.Decoder(_Model)


def model_of(body: bytes) -> str:
    """Model that a body names; empty when it names none."""
    try:
        return _models.decode(body).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


@dataclass(slots=True)
class Survey:
    """What was seen of an input so far."""

    endpoint: str
    offer: LaneOffer | None
    """None: not known, and any model is taken."""
    total: int = 0
    """Lines that aren't blank."""
    good: int = 0
    faults: list[BadLine] = field(default_factory=list[BadLine])
    """The first of them."""

    def take(self, lines: list[Line]) -> None:
        """Look at the next lines. Pure work: meant for a thread."""
        for line in lines:
            self.total += 1
            fault = self._fault_of(line)
            if fault is None:
                self.good += 1
            elif len(self.faults) < FAULTS_MAX:
                self.faults.append(fault)

    def verdict(self) -> tuple[Fault, ...]:
        """Why nothing of it can run; empty when something can."""
        if self.good:
            return ()
        if not self.total:
            message = "the input has no lines; nothing was run"
            return (Fault(code=Code.EMPTY_FILE.value, message=message),)
        return tuple(
            Fault(code=fault.code.value, message=fault.message[:4096], line=fault.number)
            for fault in self.faults
        )

    def _fault_of(self, line: Line) -> BadLine | None:
        if line.too_long:
            told = "the line is too long to be a request"
            return bad(line.number, None, Code.INVALID_REQUEST, told)
        parsed = parse_line(line.text, line.number, endpoint=self.endpoint)
        return parsed if isinstance(parsed, BadLine) else self._fault_of_model(parsed)

    def _fault_of_model(self, request: Request) -> BadLine | None:
        named = model_of(request.body)
        if not named:
            told = 'the body names no model; add "model": "..."'
            return bad(request.number, request.custom_id, Code.INVALID_REQUEST, told)
        if self.offer is None:
            return None
        model, _ = resolve(named, "", self.offer)
        if model in self.offer.models:
            return None
        offered = ", ".join(sorted(self.offer.models)) or "none"
        told = f"the lane offers no model {named!r}; it offers: {offered}"
        return bad(request.number, request.custom_id, Code.MODEL_NOT_FOUND, told)
