"""ServeGen's clients of a production service: how each one's rate and burstiness change in a day.

A folder of `chunk-N-trace.csv`, one file per client, which becomes the lane `client-N`. No header;
each row is a window of 600 s: its start (s), requests per second, coefficient of variation, and the
distribution of the gaps between requests with its shape and scale; a rate of 0 is a silent window.

- Arrivals, as published: per window rate × 600 of them, whose gaps come from the distribution and
  are then stretched to fill the window: the shape is the client's, the mean is the rate's.
- Which hours: by default half an hour from 21:00, when most clients are awake (about 30 of 73).
- Lengths: the project publishes a histogram per client and window (`chunk-N-dataset.json`), which
  isn't among the traces read here. Ours are chosen, not measured: log-normal around medians that
  each client draws once (its clients differ, the paper's main finding), prompts around 400 and
  outputs around 600 tokens, of a reasoning model's order. No prefixes.

Source: Xiang et al., "ServeGen: Workload Characterization and Generation of Large Language Model
Serving in Production", NSDI 2026; data: https://github.com/alibaba/ServeGen (data/reason),
Apache-2.0.
"""

import random
import re
from collections.abc import Iterator
from itertools import accumulate
from math import inf, isfinite
from pathlib import Path

from msgspec import Struct

from broker.sim.errors import TraceError
from broker.sim.request import Request, Workload
from broker.sim.workload.assembly import UNKNOWN_OUTPUT_MAX, assembled
from broker.sim.workload.trace_file import read_lines

WINDOW_S = 600.0
SECONDS_PER_HOUR = 3600.0
CHUNK = re.compile(r"chunk-(\d+)-trace\.csv(\.gz|\.zst)?")

REQUESTS_PER_S_MAX = 1_000.0
"""Of one client: fifty times the busiest published one."""
SHAPE_MAX = 1e6
"""Gaps that are alike to a thousandth; published ones end at 20."""
GAP_MIN, GAP_MAX = 1e-9, 1e100
"""Of what is drawn, before it is stretched: sums of these are numbers."""

PROMPT_TOKENS_MEDIAN = 400.0
OUTPUT_TOKENS_MEDIAN = 600.0
CLIENT_SIGMA = 0.7
"""Spread of the clients' medians: one in twenty is over three times the middle."""
REQUEST_SIGMA = 0.8
"""Spread within one client."""
TOKENS_MAX = 32_768
"""No length is drawn beyond: the usual output limit of a reasoning model (DeepSeek-R1's API)."""

BLOCK_TOKENS = 512
"""As in Mooncake's traces; without blocks it stands for nothing."""


class Window(Struct, frozen=True, kw_only=True):
    """One client's demand in 600 s."""

    start_s: float
    requests_per_s: float
    distribution: str
    shape: float
    scale: float


def chunks(folder: Path) -> list[tuple[int, Path]]:
    """Return the folder's clients in the order of their numbers; empty if it is no such folder."""
    found = ((CHUNK.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match)


def workload(
    folder: Path,
    *,
    name: str,
    source: str,
    rng: random.Random,
    start_h: float = 21.0,
    hours: float = 0.5,
) -> Workload:
    """Make the workload of the windows that begin in the `hours` from `start_h` on.

    Raises:
        TraceError: a row can't be read, or nobody asks anything in these hours.
    """
    start_s, end_s = start_h * SECONDS_PER_HOUR, (start_h + hours) * SECONDS_PER_HOUR
    requests: list[Request] = []
    for number, path in chunks(folder):
        windows = [w for w in _windows(path) if start_s <= w.start_s < end_s]
        requests.extend(_client(f"client-{number}", windows, rng))
    if not requests:
        raise TraceError(folder, f"no requests in {hours} h from {start_h} h on; it covers 0-24 h")
    return assembled(requests, name=name, source=source)


def _windows(path: Path) -> Iterator[Window]:
    for number, line in read_lines(path):
        try:
            start_s, rate, _, distribution, shape, scale = line.decode().split(",")
            window = Window(
                start_s=float(start_s),
                requests_per_s=float(rate),
                distribution=distribution.strip(),
                shape=float(shape),
                scale=float(scale),
            )
        except ValueError as error:
            problem = f"no row of start, rate, CV, distribution, shape, scale: {error}"
            raise TraceError(path, problem, line=number) from error
        _check_demand(window, path, number)
        if window.requests_per_s > 0:
            _check(window, path, number)
            yield window


def _check_demand(window: Window, path: Path, number: int) -> None:
    if not (isfinite(window.start_s) and 0 <= window.requests_per_s <= REQUESTS_PER_S_MAX):
        problem = (
            "the start is a number of seconds, the rate one of requests a second, at most "
            f"{REQUESTS_PER_S_MAX:,.0f}"
        )
        raise TraceError(path, problem, line=number)


def _check(window: Window, path: Path, number: int) -> None:
    if window.distribution not in ("Gamma", "Weibull"):
        problem = f"unknown distribution {window.distribution!r}: Gamma and Weibull are known"
        raise TraceError(path, problem, line=number)
    if not (0 < window.shape <= SHAPE_MAX and 0 < window.scale < inf):
        problem = (
            f"shape and scale are over 0 where the rate is, the shape at most {SHAPE_MAX:,.0f}"
        )
        raise TraceError(path, problem, line=number)


def _client(lane: str, windows: list[Window], rng: random.Random) -> Iterator[Request]:
    prompt_tokens_median = PROMPT_TOKENS_MEDIAN * rng.lognormvariate(0, CLIENT_SIGMA)
    output_tokens_median = OUTPUT_TOKENS_MEDIAN * rng.lognormvariate(0, CLIENT_SIGMA)
    for window in windows:
        for at_s in _arrivals_s(window, rng):
            yield Request(
                index=0,
                at_s=at_s,
                prompt_tokens=_length(prompt_tokens_median, rng),
                output_tokens=_length(output_tokens_median, rng),
                output_tokens_max=UNKNOWN_OUTPUT_MAX,
                block_tokens=BLOCK_TOKENS,
                lane=lane,
            )


def _arrivals_s(window: Window, rng: random.Random) -> Iterator[float]:
    """Yield the arrivals; one gap more than these, so that none falls on the window's end."""
    arrivals = round(window.requests_per_s * WINDOW_S)
    gaps = [_gap(window, rng) for _ in range(arrivals + 1)]
    stretch = WINDOW_S / sum(gaps)
    for offset in accumulate(gaps[:-1]):
        yield window.start_s + offset * stretch


def _gap(window: Window, rng: random.Random) -> float:
    try:
        if window.distribution == "Gamma":
            drawn = rng.gammavariate(window.shape, window.scale)
        else:
            drawn = rng.weibullvariate(window.scale, window.shape)
    except OverflowError:
        return GAP_MAX
    # A very bursty client's gaps may all round to nothing, but for one beyond all measure.
    return min(max(drawn, GAP_MIN), GAP_MAX)


def _length(median: float, rng: random.Random) -> int:
    return min(TOKENS_MAX, max(1, round(median * rng.lognormvariate(0, REQUEST_SIGMA))))
