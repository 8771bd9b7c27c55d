"""What a running vLLM 0.32 published, read and followed to its end.

Each line of the recording is [topic, sequence, payload] in base64. The engine had a small cache and
was reset twice: sequences 16 and 23.
"""

import base64
from pathlib import Path

import orjson

from worker_agent.engine.kv_event_wire import (
    AllBlocksCleared,
    Batch,
    BlockName,
    BlockRemoved,
    BlockStored,
    read_batch,
    read_frames,
)
from worker_agent.engine_blocks import EngineBlocks, TokenizedPrompt

RECORDING = Path(__file__).with_name("vllm_kv_events.jsonl")


def recorded() -> dict[int, Batch]:
    """The recording, by sequence."""
    lines = [orjson.loads(line) for line in RECORDING.read_bytes().splitlines()]
    frames = [read_frames([base64.b64decode(frame) for frame in line]) for line in lines]
    return {sequence: read_batch(payload) for sequence, payload in frames}


def the_prompts(batches: dict[int, Batch]) -> list[list[int]]:
    """Each prompt's tokens: what was stored at the root, with what continued it."""
    prompts: dict[BlockName, list[int]] = {}
    for batch in batches.values():
        for event in batch.events:
            if isinstance(event, BlockStored):
                before = prompts.pop(event.parent) if event.parent in prompts else []
                prompts[event.names[-1]] = [*before, *event.tokens]
    return list(prompts.values())


def test_all_of_it_is_read() -> None:
    """Nothing is unknown, and the order is whole."""
    batches = recorded()
    assert list(batches) == list(range(16, 28))
    assert not any(batch.unknown for batch in batches.values())
    kinds = [type(event) for batch in batches.values() for event in batch.events]
    assert kinds.count(AllBlocksCleared) == 2
    assert kinds.count(BlockStored) == 12
    assert kinds.count(BlockRemoved) == 80


def test_prefixes_are_credited_and_lost_as_the_engine_says() -> None:
    """Each block of ours (of two engine blocks here) is held exactly while both of its own are."""
    batches = recorded()
    blocks = EngineBlocks()
    chains: list[list[int]] = []
    held: dict[BlockName, tuple[int, ...]] = {}
    for number, tokens in enumerate(the_prompts(batches)):
        chains.append([1000 * number + index for index in range(len(tokens) // 64)])
        edges = [64 * (index + 1) for index in range(len(chains[-1]))]
        blocks.learn(TokenizedPrompt(chain=chains[-1], edges=edges, tokens=tokens), at_s=0.0)
    most = 0
    for batch in batches.values():
        for event in batch.events:
            blocks.apply(event)
            _follow(held, event)
        expected = [_depth(tokens, set(held.values())) // 2 for tokens in the_prompts(batches)]
        assert [blocks.depth(chain) for chain in chains] == expected
        most = max(most, *expected)
    assert most > 30
    assert blocks.orphans == blocks.beyond == 0


def _follow(held: dict[BlockName, tuple[int, ...]], event: object) -> None:
    """The engine's cache as whole prefixes of tokens, by name."""
    match event:
        case BlockStored():
            before = held.get(event.parent, ()) if event.parent is not None else ()
            for index, name in enumerate(event.names):
                before = (*before, *event.tokens[32 * index : 32 * index + 32])
                held[name] = before
        case BlockRemoved():
            for name in event.names:
                held.pop(name, None)
        case _:
            held.clear()


def _depth(tokens: list[int], held: set[tuple[int, ...]]) -> int:
    depth = 0
    while (depth + 1) * 32 <= len(tokens) and tuple(tokens[: (depth + 1) * 32]) in held:
        depth += 1
    return depth
