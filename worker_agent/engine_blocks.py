"""Which of our prefix blocks an engine holds, from its own events. Pure: times are passed in.

The engine's blocks form a tree: each is named by its tokens and its parent. From a prompt's tokens
we know the path it takes there, and with `token_edges` the place on the path where each of our
blocks ends: at the last engine block that lies wholly before its end. Our block is held while every
engine block down to that place is. So one engine block may carry many chains, and when it goes, all
go that need it.

What a prompt shares with another ends inside an engine block that both can't share. Up to one
engine block of tokens (16 to 64) at that edge is therefore credited and not there; a block of ours
that is shorter than an engine block counts with the first.

An engine that keeps layers of several kinds announces each group by itself: the first group seen
that attends to the whole prefix stands for all. Blocks elsewhere than on the accelerator don't
count: to load them takes time that the predictions don't know.
"""

import struct
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

from worker_agent.engine.kv_event_wire import (
    AllBlocksCleared,
    BlockName,
    BlockRemoved,
    BlockStored,
    KvEvent,
)

NODES_MAX = 262_144
"""Engine blocks known at most, about 600 bytes each: 4 M tokens in blocks of 16, more than one
accelerator keeps of most models. What is stored beyond earns no credit."""

PLACES_MAX = 262_144
"""Our blocks with a known place at most: 64 MiB of distinct prompts. The least recently used go."""

UNPLACED_MAX = 64
"""Prompts kept until the first event tells how long the engine's blocks are; the oldest go."""

_ON_ACCELERATOR = ("", "GPU")
_WHOLE_PREFIX = ("full", "mla")
"""Parts of the names that vLLM gives to kinds of attention that look back to the beginning."""
_PART_OF_PREFIX = "sliding"

_LINKS = struct.Struct("<QQQ?")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedPrompt:
    """A prompt in both measures."""

    chain: Sequence[int]
    """Our blocks, first block first."""
    edges: Sequence[int]
    """Tokens before each one's end."""
    tokens: Sequence[int]
    model: str = ""
    """As the engine was asked for it: an adapter, if its events name one so."""
    adapter: str = ""
    """As the job names it."""
    extra: str = ""
    """What else decides its first block's name, `kv_event_wire.extra_text`."""


@dataclass(slots=True, eq=False)
class _Node:
    """An engine block that the engine told of or a prompt needs."""

    key: int
    parent: "_Node | None"
    names: int = 0
    """How many of the engine's names stand for it: one, or none where only a prompt needs it."""
    is_held: bool = False
    is_reachable: bool = False
    """Held, and so are all before it: a prompt can use it."""
    children: "dict[int, _Node]" = field(default_factory=dict[int, "_Node"])
    places: "dict[int, _Place]" = field(default_factory=dict[int, "_Place"])


@dataclass(slots=True, eq=False)
class _Place:
    """One of our blocks, and the engine block where it ends."""

    block: int
    node: _Node
    parent: "_Place | None"
    used_at_s: float
    is_credited: bool = False
    children: "dict[int, _Place]" = field(default_factory=dict[int, "_Place"])


class EngineBlocks:
    """One engine's cache as its events tell it."""

    def __init__(self, *, nodes_max: int = NODES_MAX, places_max: int = PLACES_MAX) -> None:
        self._nodes_max = nodes_max
        self._places_max = places_max
        self._nodes: dict[int, _Node] = {}
        self._named: dict[BlockName, tuple[_Node, ...]] = {}
        """Older SGLang named a block by its own tokens alone: one name, several blocks."""
        self._places: OrderedDict[int, _Place] = OrderedDict()
        """Least recently used first, children before their parents."""
        self._unplaced: OrderedDict[int, tuple[TokenizedPrompt, float]] = OrderedDict()
        self._changed: dict[int, None] = {}
        """Our blocks that were credited or lost credit since the last `take`, in order."""
        self._block_size = 0
        self._group: int | None = None
        self._adapters: set[str] = set()
        self.orphans = 0
        """Blocks stored under a parent that is not known: from before we listened."""
        self.beyond = 0
        """Blocks that found no room."""

    @property
    def nodes_count(self) -> int:
        """Engine blocks known."""
        return len(self._nodes)

    def depth(self, chain: Sequence[int]) -> int:
        """Return how many of our blocks from the front of `chain` the engine holds."""
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            place = self._places.get(chain[middle])
            if place is not None and place.is_credited:
                low = middle + 1
            else:
                high = middle
        return low

    def knows(self, chain: Sequence[int]) -> bool:
        """Tell whether the places of all its blocks are known: its tokens need not be asked."""
        # A chain's places go from its end, so the last one speaks for all.
        return not chain or chain[-1] in self._places or chain[-1] in self._unplaced

    def use(self, chain: Sequence[int], *, at_s: float) -> None:
        """Note that a prompt was used."""
        for block in reversed(chain):
            if place := self._places.get(block):
                place.used_at_s = at_s
                self._places.move_to_end(block)

    def take(self) -> tuple[list[int], list[int]]:
        """Return our blocks credited and gone since the last call, parents first and last."""
        stored: list[int] = []
        gone: list[int] = []
        for block in self._changed:
            place = self._places.get(block)
            (stored if place is not None and place.is_credited else gone).append(block)
        self._changed.clear()
        gone.reverse()
        return stored, gone

    # ---- the engine's word ----------------------------------------------------------------------

    def apply(self, event: KvEvent) -> None:
        """Take one event; they come in the engine's order."""
        match event:
            case BlockStored():
                if event.medium.upper() in _ON_ACCELERATOR and self._is_followed(event):
                    self._store(event)
            case BlockRemoved():
                if event.medium.upper() in _ON_ACCELERATOR and event.group in (None, self._group):
                    for name in event.names:
                        self._remove(name)
            case AllBlocksCleared():
                self.empty()

    def empty(self) -> None:
        """Hold nothing; what is known of prompts stays."""
        for place in self._credited():
            place.is_credited = False
            self._note(place)
        kept: dict[int, _Node] = {}
        for place in self._places.values():
            node: _Node | None = place.node
            while node is not None and node.key not in kept:
                kept[node.key] = node
                node = node.parent
        for node in kept.values():
            node.names, node.is_held, node.is_reachable = 0, False, False
            node.children = {key: child for key, child in node.children.items() if key in kept}
        self._nodes = kept
        self._named = {}

    def clear(self) -> None:
        """Know nothing: another engine, with perhaps another tokenizer."""
        self._changed.update((place.block, None) for place in self._credited())
        self._nodes.clear()
        self._named.clear()
        self._places.clear()
        self._unplaced.clear()
        self._adapters.clear()
        self._block_size, self._group = 0, None

    def _credited(self) -> list[_Place]:
        credited = [place for place in self._places.values() if place.is_credited]
        credited.reverse()
        return credited

    def _is_followed(self, event: BlockStored) -> bool:
        kind = event.kind.lower()
        if kind and (_PART_OF_PREFIX in kind or not any(one in kind for one in _WHOLE_PREFIX)):
            return False
        if not self._block_size:
            self._block_size, self._group = event.block_size, event.group
            self._place_waiting()
        return event.group == self._group and event.block_size == self._block_size

    def _store(self, event: BlockStored) -> None:
        parent: _Node | None = None
        if event.parent is not None:
            known = self._named.get(event.parent)
            if known is None:
                self.orphans += len(event.names)
                return
            parent = known[-1]
        if event.adapter:
            self._adapters.add(event.adapter)
        size = self._block_size
        for index, name in enumerate(event.names):
            extra = event.extras[index] if index < len(event.extras) else ""
            tokens = event.tokens[index * size : (index + 1) * size]
            node = self._node(parent, _key(parent, tokens, event.adapter, extra))
            if node is None:
                self.beyond += len(event.names) - index
                return
            self._name(name, node)
            node.is_held = True
            self._reach(node)
            parent = node

    def _name(self, name: BlockName, node: _Node) -> None:
        named = self._named.get(name, ())
        if node not in named:
            node.names += 1
        self._named[name] = (*(one for one in named if one is not node), node)

    def _remove(self, name: BlockName) -> None:
        for node in self._named.pop(name, ()):
            node.is_held = False
            node.names -= 1
            self._lose(node)
            self._prune(node)

    # ---- prompts --------------------------------------------------------------------------------

    def learn(self, prompt: TokenizedPrompt, *, at_s: float) -> None:
        """Take a prompt's tokens."""
        if not prompt.chain:
            return
        if not self._block_size:
            self._unplaced[prompt.chain[-1]] = (prompt, at_s)
            if len(self._unplaced) > UNPLACED_MAX:
                self._unplaced.popitem(last=False)
            return
        path = self._path(prompt)
        parent: _Place | None = None
        for block, edge in zip(prompt.chain, prompt.edges, strict=False):
            count = max(1, edge // self._block_size)
            if count > len(path):
                break
            parent = self._put(block, path[count - 1], parent, at_s)
        self._prune(path[-1] if path else None)
        self.use(prompt.chain, at_s=at_s)
        self._shrink()

    def expire(self, before_s: float) -> None:
        """Forget the places of what was not used since `before_s`."""
        while self._places:
            place = next(iter(self._places.values()))
            if place.used_at_s >= before_s:
                return
            self._forget(place)

    def _place_waiting(self) -> None:
        waiting, self._unplaced = self._unplaced, OrderedDict()
        for prompt, at_s in waiting.values():
            self.learn(prompt, at_s=at_s)

    def _path(self, prompt: TokenizedPrompt) -> list[_Node]:
        """Return the engine blocks that its prefix blocks end in, as far as there is room."""
        adapter = prompt.adapter or (prompt.model if prompt.model in self._adapters else "")
        size = self._block_size
        needed = min(len(prompt.tokens), max(size, prompt.edges[-1]))
        path: list[_Node] = []
        parent: _Node | None = None
        for start in range(0, needed - size + 1, size):
            extra = prompt.extra if start == 0 else ""
            key = _key(parent, prompt.tokens[start : start + size], adapter, extra)
            parent = self._node(parent, key)
            if parent is None:
                break
            path.append(parent)
        return path

    def _put(self, block: int, node: _Node, parent: _Place | None, at_s: float) -> _Place:
        place = self._places.get(block)
        if place is None:
            place = self._places[block] = _Place(block, node, parent, at_s)
            if parent is not None:
                parent.children[block] = place
        elif place.node is not node:
            # Other tokens for the same text (another template): the newest prompt counts.
            del place.node.places[block]
            self._discredit(place)
            self._prune(place.node)
            place.node = node
        node.places[block] = place
        self._credit(place)
        return place

    def _shrink(self) -> None:
        while len(self._places) > self._places_max:
            self._forget(next(iter(self._places.values())))

    def _forget(self, place: _Place) -> None:
        self._discredit(place)
        del self._places[place.block]
        del place.node.places[place.block]
        if place.parent is not None:
            place.parent.children.pop(place.block, None)
        self._prune(place.node)

    # ---- the two trees --------------------------------------------------------------------------

    def _node(self, parent: _Node | None, key: int) -> _Node | None:
        """Return the block of that key, made if there is room."""
        node = self._nodes.get(key)
        if node is None and len(self._nodes) < self._nodes_max:
            node = self._nodes[key] = _Node(key, parent)
            if parent is not None:
                parent.children[key] = node
        return node

    def _prune(self, node: _Node | None) -> None:
        """Forget a block that nothing needs any more, and its parents that only it needed."""
        while node is not None and not (node.is_held or node.names or node.places or node.children):
            del self._nodes[node.key]
            if node.parent is not None:
                node.parent.children.pop(node.key, None)
            node = node.parent

    def _reach(self, node: _Node) -> None:
        waiting = [node]
        while waiting:
            node = waiting.pop()
            above = node.parent is None or node.parent.is_reachable
            if node.is_reachable or not node.is_held or not above:
                continue
            node.is_reachable = True
            for place in node.places.values():
                self._credit(place)
            waiting.extend(node.children.values())

    def _lose(self, node: _Node) -> None:
        waiting = [node]
        while waiting:
            node = waiting.pop()
            if not node.is_reachable:
                continue
            node.is_reachable = False
            for place in node.places.values():
                self._discredit(place)
            waiting.extend(node.children.values())

    def _credit(self, place: _Place) -> None:
        waiting = [place]
        while waiting:
            place = waiting.pop()
            above = place.parent is None or place.parent.is_credited
            if place.is_credited or not place.node.is_reachable or not above:
                continue
            place.is_credited = True
            self._note(place)
            waiting.extend(place.children.values())

    def _discredit(self, place: _Place) -> None:
        waiting = [place]
        while waiting:
            place = waiting.pop()
            if place.is_credited:
                place.is_credited = False
                self._note(place)
                waiting.extend(place.children.values())

    def _note(self, place: _Place) -> None:
        # Taken out first: what is told must stand in the order of the last change.
        self._changed.pop(place.block, None)
        self._changed[place.block] = None


def _key(parent: _Node | None, tokens: Sequence[int], adapter: str, extra: str) -> int:
    """Hash of a block and all before it; the adapter counts in the first, like the engines'."""
    before = _text_hash(adapter) if parent is None else parent.key
    content = xxhash.xxh3_64_intdigest(array("Q", tokens).tobytes())
    return xxhash.xxh3_64_intdigest(
        _LINKS.pack(before, content, _text_hash(extra), parent is not None)
    )


def _text_hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode(errors="surrogatepass")) if text else 0
