"""How fast and how large a modelled engine is: figures with their units and source."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Curve:
    """constant + slope · x + bend · x², in seconds. What x is, the profile says."""

    constant_s: float
    slope_s: float
    bend_s: float

    def at(self, x: float) -> float:
        """Return the seconds at `x`."""
        return self.constant_s + (self.slope_s + self.bend_s * x) * x

    def over(self, start: float, stride: float, count: int) -> float:
        """Return the sum over `count` points from `start`, each `stride` further (no loop)."""
        firsts = count * (count - 1) / 2.0
        squares = (count - 1) * count * (2 * count - 1) / 6.0
        line = count * start + stride * firsts
        square = count * start * start + 2.0 * start * stride * firsts + stride * stride * squares
        return count * self.constant_s + self.slope_s * line + self.bend_s * square


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One kind of engine on one kind of machine."""

    name: str
    source: str
    slots: int
    """Requests that run at once (vLLM: max_num_seqs, llama.cpp: n_parallel)."""
    step_tokens_max: int
    """Tokens one step may compute, decoded and prefilled (vLLM: max_num_batched_tokens)."""
    kv_tokens_max: int
    """Capacity of the KV cache, what runs and what is kept for reuse together."""
    block_tokens: int
    """Prompt tokens that one prefix-block hash stands for, unless a request says otherwise."""
    prefill_s: Curve
    """Seconds that a step spends on prefill, over the prompt tokens it computes (when any)."""
    decode_s: Curve
    """Seconds that a step adds when it yields tokens, over the share of KV in use (0..1)."""


REFERENCE = Profile(
    name="reference",
    source=(
        "Least squares over measured tables of NVIDIA Dynamo 1.4.2's offline replay (one worker, "
        "block_size 64, 16,000 blocks, max_num_seqs 256, max_num_batched_tokens 8,192); every row "
        "of both tables within 0.5 %."
    ),
    slots=256,
    step_tokens_max=8192,
    kv_tokens_max=16_000 * 64,
    block_tokens=512,  # What one hash id of the Mooncake traces stands for.
    prefill_s=Curve(16.46e-3, 15.23e-6, 4.22e-10),
    decode_s=Curve(5.74e-3, 54.2e-3, -26.4e-3),
)

DEMO = Profile(
    name="demo",
    source=(
        "Chosen, not measured: 7,000 prefill tokens/s and 10 ms a token, about a 70B model on one "
        "accelerator. A cold 2,000-token prompt takes 10 times as long to its first token as a "
        "warm one, and the cache holds a quarter of the demo's 20 system prompts."
    ),
    slots=6,
    step_tokens_max=2048,
    kv_tokens_max=6 * 2304,  # Six sequences: llama.cpp keeps one a slot, and both demos compare.
    block_tokens=64,  # The wire's 256-byte blocks at 4 bytes a token.
    prefill_s=Curve(4.0e-3, 1.35e-4, 0.0),
    decode_s=Curve(10.0e-3, 10.0e-3, 0.0),
)

PROFILES = {profile.name: profile for profile in (REFERENCE, DEMO)}
