"""Load, slots and models are read off each engine's own pages."""

import time

import orjson
import pytest

from broker.wire.codec import decode, encode
from broker.wire.messages import Load
from worker_agent.engine.scrape import (
    LoadReader,
    RateMeter,
    models_in,
    parse_metrics,
    slots_in,
    takes_any_model,
    tokens_total,
)

LLAMA_PAGE = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed, excluding cached tokens
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 3000
llamacpp:prompt_tokens_cached_total 900
llamacpp:prompt_seconds_total 0.5
llamacpp:tokens_predicted_total 200
llamacpp:tokens_predicted_seconds_total 4
llamacpp:requests_processing 3
llamacpp:requests_deferred 2
"""
VLLM_PAGE = """\
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000",x="a{b"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="1000",x="a{b"} 1.0
vllm:request_prefill_kv_computed_tokens_sum{model_name="m"} 8000.0
vllm:request_prefill_time_seconds_sum{model_name="m"} 2.0
vllm:inter_token_latency_seconds_sum{model_name="m"} 2.0
vllm:inter_token_latency_seconds_count{model_name="m"} 100.0
vllm:prompt_tokens_total{model_name="m"} 5000.0
"""
SGLANG_PAGE = """\
sglang:num_running_reqs{model_name="m"} 5
sglang:num_queue_reqs{model_name="m"} 6
sglang:token_usage{model_name="m"} 0.5
sglang:max_total_num_tokens{model_name="m"} 2000
"""
TGI_PAGE = "tgi_batch_current_size 7\ntgi_queue_size 8\n"


@pytest.mark.parametrize(
    ("page", "load"),
    [
        (
            LLAMA_PAGE,
            Load(
                running=3,
                waiting=2,
                kv_tokens_max=4096,
                prefill_tokens_s=6000.0,
                decode_tokens_s=50.0,
            ),
        ),
        (
            VLLM_PAGE,
            Load(
                running=7,
                waiting=1,
                kv_tokens_used=16_000,
                kv_tokens_max=32_000,
                prefill_tokens_s=4000.0,
                decode_tokens_s=50.0,
            ),
        ),
        (SGLANG_PAGE, Load(running=5, waiting=6, kv_tokens_used=1000, kv_tokens_max=2000)),
        (TGI_PAGE, Load(running=7, waiting=8, kv_tokens_max=4096)),
        ("", Load(kv_tokens_max=4096)),
        ("<html>not metrics</html>\n{} 1\nname\nname x\n", Load(kv_tokens_max=4096)),
    ],
)
def test_load(page: str, load: Load) -> None:
    """Each engine's names mean the same things; what it doesn't tell is 0."""
    assert LoadReader().read(page, kv_tokens_max=4096) == load


def test_values_that_are_no_numbers_are_passed_over() -> None:
    """NaN, infinity and negative values never reach the broker."""
    page = "a NaN\nb +Inf\nc -1\nd 2 1700000000\n"
    assert parse_metrics(page) == {"d": [2.0]}


def test_share_beyond_one_is_full() -> None:
    """A share is between 0 and 1, whatever the engine says."""
    page = "sglang:token_usage 3.5\nsglang:max_total_num_tokens 100\n"
    assert LoadReader().read(page, kv_tokens_max=0).kv_tokens_used == 100


def test_rate_follows_and_forgets() -> None:
    """The rate is tokens over seconds at it; an idle stretch changes nothing, new figures win."""
    meter = RateMeter()
    assert meter.read(0, 0) == 0.0
    assert meter.read(1000, 1) == pytest.approx(1000)
    assert meter.read(1000, 1) == pytest.approx(1000)
    rates = [meter.read(1000 + 100 * turn, 1 + turn) for turn in range(1, 20)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(100, rel=0.02)


def test_rate_survives_a_counter_that_fell() -> None:
    """A restarted engine counts from 0: no negative rate comes of it."""
    meter = RateMeter()
    meter.read(1000, 1)
    assert meter.read(10, 0.01) == pytest.approx(1000)
    assert meter.read(1010, 1.01) == pytest.approx(1000)


def test_tokens_total_counts_all_counters() -> None:
    """The sum by which a restart is noticed takes in all token counters."""
    assert tokens_total(parse_metrics(LLAMA_PAGE)) == 3000 + 900 + 200 + 4
    assert (
        tokens_total(parse_metrics("<html>not metrics</html>\nvllm:num_requests_running 1\n"))
        is None
    )


BEYOND = (
    "vllm:num_requests_running 1e300\n",
    "sglang:num_queue_reqs 1e308\n" * 3,
    "sglang:max_total_num_tokens 1e300\nsglang:token_usage 1e300\n",
    "vllm:num_requests_waiting 9e15\n" * 3,
    f'vllm:cache_config_info{{num_gpu_blocks="{"9" * 30}",block_size="16"}} 1\n',
    f'vllm:cache_config_info{{num_gpu_blocks="{"9" * 5000}",block_size="16"}} 1\n',
    f'vllm:cache_config_info{{num_gpu_blocks="{"9" * 15}",block_size="{"9" * 15}"}} 1\n',
    "llamacpp:prompt_tokens_total 1e9\nllamacpp:prompt_seconds_total 1e-300\n",
    "llamacpp:tokens_predicted_total 1e15\nllamacpp:tokens_predicted_seconds_total 1e-9\n",
)
"""Pages of engines whose counters went astray."""


@pytest.mark.parametrize("page", BEYOND)
def test_figures_that_no_engine_can_mean_are_not_told(page: str) -> None:
    """One of them in a heartbeat, and no broker could read it: the worker would be lost."""
    load = LoadReader().read(page, kv_tokens_max=4096)
    assert decode(encode(load), Load) == load
    assert load in (Load(kv_tokens_max=4096), Load(kv_tokens_used=4096, kv_tokens_max=4096))


def test_a_page_of_one_endless_word_is_read_in_time() -> None:
    """It held up the agent for minutes, and every job beside it."""
    began_s = time.thread_time()
    for junk in ("a" * 500_000, 'a="' * 150_000, "{" * 500_000, "a{" * 250_000):
        LoadReader().read(f"vllm:cache_config_info{{{junk}}} 1\n", kv_tokens_max=0)
    assert time.thread_time() - began_s < 5.0


def test_names_that_no_job_can_ask_for_are_left_out() -> None:
    """Empty or too long for the wire; those beside them are served."""
    listed = [{"id": ""}, {"id": "x" * 257}, {"id": "y" * 256, "aliases": ["", "z"]}]
    assert models_in(orjson.dumps({"data": listed})) == ("y" * 256, "z")


def test_models() -> None:
    """Names and aliases, each once."""
    body = orjson.dumps(
        {"data": [{"id": "m", "aliases": ["m", "n", 3], "owned_by": "llamacpp"}, {"id": 4}, "x"]}
    )
    assert models_in(body) == ("m", "n")
    assert takes_any_model(body)
    assert not takes_any_model(b'{"data": [{"id": "m", "owned_by": "vllm"}]}')


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"data": 1}'])
def test_page_of_another_shape_tells_nothing(body: bytes) -> None:
    """Garbage is no model, no slot and no claim."""
    assert models_in(body) == ()
    assert slots_in(body) == (0, 0)
    assert not takes_any_model(body)


@pytest.mark.parametrize(
    ("props", "expected"),
    [
        ({"total_slots": 4, "default_generation_settings": {"n_ctx": 4096}}, (4, 16_384)),
        ({"total_slots": 4}, (4, 0)),
        ({"total_slots": 4, "default_generation_settings": {"n_ctx": "many"}}, (4, 0)),
        ({"total_slots": 0, "default_generation_settings": {"n_ctx": 4096}}, (0, 0)),
        ({"total_slots": "4"}, (0, 0)),
    ],
)
def test_slots(props: object, expected: tuple[int, int]) -> None:
    """llama.cpp says how many slots it has, and the context of one."""
    assert slots_in(orjson.dumps(props)) == expected
