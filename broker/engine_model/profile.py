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

    def prefill_alone_s(self, tokens: int) -> float:
        """Return the seconds that so many prompt tokens take where nothing else runs: by steps."""
        steps, rest = divmod(tokens, self.step_tokens_max)
        whole_s = steps * self.prefill_s.at(self.step_tokens_max)
        return whole_s + (self.prefill_s.at(rest) if rest else 0.0)


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

H100X2_LLAMA_70B = Profile(
    name="h100x2-llama-70b",
    source=(
        "Llama 3.3 70B in FP8 on two H100 SXM 80 GB, one worker (tensor parallel): NVIDIA, NIM for "
        "LLMs Benchmarking Guide 1.0.0, Performance, NIM 1.8.0 "
        "(docs.nvidia.com/nim/benchmarking/llm/1.0.0/performance). Alone, a first token within "
        "11 %; up to saturation, ITL and throughput of prompts of 5,000 and 20,000 tokens within "
        "11 %. With prompts of 1,000 and 100 clients ITL is 12 % too low: D knows no batch size."
    ),
    # As many as were seen to run at once (200 in, 200 out, 250 clients: 5,067 tok/s x 48.2 ms).
    slots=256,
    step_tokens_max=8192,  # TensorRT-LLM's max_num_tokens, unless set.
    # Where more clients bring no more throughput, the running requests are throughput x ITL, and
    # TensorRT-LLM reserves prompt and whole answer for each. Four shapes agree within 0.5 %:
    #   5,000 +   500:   917.3 tok/s x 92.9 ms =  85.2 running x  5,500 = 469 k tokens
    #  20,000 + 2,000:   427.1       x 50.1    =  21.4         x 22,000 = 471 k
    #     500 + 2,000: 4,624.1       x 40.7    = 188.3         x  2,500 = 471 k
    #   1,000 + 1,000: 4,167.4       x 56.3    = 234.6         x  2,000 = 469 k
    # Check: 164 kB a token (2 x 80 layers x 8 heads x 128, FP8) make 77 GB; 2 x 80 GB less 70.6 GB
    # of weights leave 89 GB, of which TensorRT-LLM takes 90 %, less its activations.
    kv_tokens_max=470_016,  # 918 blocks.
    block_tokens=512,  # What one hash id of the Mooncake traces stands for.
    # TTFT alone less one D: 12.8, 29.4, 64.1, 388, 1,815 ms of 200, 500, 1,000, 5,000, 20,000
    # tokens, that is 64, 59, 64, 78, 91 us a token; the last takes three steps. A roofline check:
    # 2 x 70.6e9 FLOP a token / (2 x 1,979 TFLOPS, dense FP8) = 36 us, so 58 % of the peak.
    prefill_s=Curve(0.0, 6.2e-5, 2.6e-9),
    # ITL alone: 18.7 ms, and 19.6 where 20,000 tokens are in use. Roofline checks: 70.6 GB of
    # weights / (2 x 3.35 TB/s) = 10.5 ms; the whole KV cache, 77 GB: 11.5 ms. The slope:
    # 20,000 + 2,000 at 5 and 250 clients, less what others' prefills take (1.8 s of 2,000 tokens'
    # time each): (21.6 - 18.4) / 0.24 and (31.5 - 18.4) / 1.0 make 13 ms; 15, for shorter prompts
    # lie above.
    decode_s=Curve(18.4e-3, 15.0e-3, 0.0),
)

A100_QWEN_32B = Profile(
    name="a100-qwen3-32b",
    source=(
        "Qwen3-32B in BF16 on one A100 PCIe 80 GB, vLLM 0.19.0 in eager mode: nine closed-loop "
        "rows of github.com/cssnoeasy/a100-vllm-benchmark-blog (e4226b0f), "
        "docs/reports/a100-quantization-capacity.md. Throughput of every row within 4 %, worst ITL "
        "within 5 %, TTFT of prompts that come together within 4 % (of the fewest, 18 % short)."
    ),
    slots=256,  # vLLM's max_num_seqs on an A100, unless set.
    step_tokens_max=2048,  # vLLM's max_num_batched_tokens on an A100, unless set.
    # As vLLM told at its start: 9.57 GiB beside 61 GiB of weights. Check: 262,144 bytes a token
    # (2 x 64 layers x 8 heads x 128 x 2 bytes) make 10.28 GB.
    kv_tokens_max=39_200,
    block_tokens=16,  # vLLM's pages.
    # Prompts that come together: the last of 8 x 2,048 tokens has its first token after 5,162 ms,
    # of 16 x 2,048 after 10,304 ms: 643 ms a step of 2,048 tokens, less one D (about 49 ms): 594.
    # Roofline check: 2 x 32.8e9 FLOP a token / 312 TFLOPS = 210 us, so 72 % of the peak.
    prefill_s=Curve(0.0, 2.9e-4, 0.0),
    # From throughput: c clients, each wave prefilled first, then 1 token a step for each.
    #   4 x   512: 47.5 ms at a share of 0.065    4 x 2,048: 48.9 ms at 0.235
    #   32 x  512: 52 ms at 0.52                 12 x 2,048: 52.4 ms at 0.705
    # Roofline checks: 65.5 GB of weights / 1.935 TB/s = 33.9 ms (72 % of the bandwidth); the whole
    # KV cache, 10.28 GB: 5.3 ms.
    decode_s=Curve(46.9e-3, 8.2e-3, 0.0),
)

PROFILES = {profile.name: profile for profile in (REFERENCE, DEMO, H100X2_LLAMA_70B, A100_QWEN_32B)}
