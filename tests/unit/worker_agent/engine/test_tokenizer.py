"""What is asked of `/tokenize`, and how its answer and the prefix blocks come together."""

import orjson
import pytest

from broker.wire.prefix import BLOCK_BYTES, block_hashes
from broker.wire.prompt import prompt_text
from worker_agent.engine.base import EngineGarbage
from worker_agent.engine.tokenizer import TOKENIZE_BYTES_MAX, Prompt, question_of, understood

CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "x" * 600}],
    "tools": [{"type": "function"}],
    "chat_template_kwargs": {"thinking": False},
    "max_tokens": 9,
    "stream": True,
    "cache_salt": "s",
}


def a_prompt(body: object) -> Prompt:
    """A prompt with the blocks that its producer sends."""
    packed = orjson.dumps(body)
    text = prompt_text(body) if isinstance(body, dict) else b""
    return Prompt(chain=block_hashes(text, seed=1), body=packed, adapter="law")


def test_what_decides_the_tokens_is_asked_and_nothing_else() -> None:
    """In the engine's own names, with the tokens' strings."""
    question = question_of(a_prompt(CHAT))
    assert question is not None
    asked = orjson.loads(question)
    assert asked.pop("return_token_strs") is True
    names = ("model", "messages", "tools", "chat_template_kwargs")
    assert asked == {name: CHAT[name] for name in names}
    assert question_of(a_prompt({"model": "m", "prompt": "text"})) is not None


@pytest.mark.parametrize(
    "body", [{"prompt": [1, 2]}, {"prompt": ["a", "b"]}, {"input": "x"}, {}, [], 3]
)
def test_what_has_no_question_is_not_asked(body: object) -> None:
    """Token ids, several prompts, responses, garbage."""
    assert question_of(a_prompt(body)) is None


def test_a_body_beyond_the_bound_is_not_asked() -> None:
    """A question takes the engine's time."""
    body = {"model": "m", "prompt": "x" * TOKENIZE_BYTES_MAX}
    assert question_of(a_prompt(body)) is None
    assert question_of(Prompt(chain=(), body=b"not JSON")) is None


def test_tokens_and_blocks_come_together() -> None:
    """With the names under which the engine caches it."""
    prompt = a_prompt(CHAT)
    answer = orjson.dumps({"tokens": list(range(300)), "count": 300, "max_model_len": 4096})
    told = understood(prompt, answer)
    assert len(told.chain) == len(told.edges) == len(prompt_text(CHAT)) // BLOCK_BYTES
    assert told.tokens == list(range(300))
    assert (told.model, told.adapter, told.extra) == ("m", "law", "['s']")


def test_blocks_beyond_the_text_are_left_out() -> None:
    """A producer that sent more than its text has."""
    prompt = Prompt(chain=range(100), body=orjson.dumps(CHAT))
    told = understood(prompt, b'{"tokens": [1, 2]}')
    assert len(told.chain) == len(told.edges) == 2


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b'{"tokens": [[1]]}', b'{"tokens": ["a"]}', b'{"tokens": [-1]}', b"{}"]
)
def test_another_answer_is_garbage(answer: bytes) -> None:
    """Told as the engine's."""
    with pytest.raises(EngineGarbage):
        understood(a_prompt(CHAT), answer)
