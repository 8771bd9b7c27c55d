"""The registry: every peer in a fixed order, and made by label."""

import random

import pytest

from broker.sim.peers.registry import PEERS, labels, make
from tests.unit.sim.peers.workers import FakeWorker, a_request


def test_every_setting_of_every_peer_is_made_and_chooses() -> None:
    """A label makes a policy that names a place there is, before and after a worker is lost."""
    for label in labels():
        peer = make(label)(random.Random(1))
        workers = [FakeWorker(id=place) for place in range(3)]
        for index in range(6):
            request = a_request(range(index), index=index)
            place = peer.choose(request, workers, at_s=float(index))
            assert 0 <= place < 3, label
            peer.first_token(request, workers[place], at_s=index + 0.5)
            peer.ended(request, workers[place], at_s=index + 0.75)
        peer.lost(workers.pop(0), at_s=7.0)
        assert 0 <= peer.choose(a_request(range(3)), workers, at_s=8.0) < 2, label


def test_a_peer_names_its_source_and_its_default_comes_first() -> None:
    """A bare name stands for the project's default."""
    for name, peer in PEERS.items():
        assert peer.SOURCE
        first_label = next(iter(peer.variants()))
        assert first_label.startswith(name)
        made = make(name)(random.Random(1))
        assert type(made) is type(make(first_label)(random.Random(1)))


def choices(label: str, *, seed: int) -> list[int]:
    """Route 200 prompts that share beginnings to workers whose counts go up and down."""
    peer = make(label)(random.Random(seed))
    workload = random.Random(7)
    workers = [FakeWorker(id=place) for place in range(5)]
    places: list[int] = []
    for index in range(200):
        group = workload.randrange(12)
        blocks = (0, 100 + group, *range(1000 + 10 * index, 1000 + 10 * index + 3))
        place = peer.choose(a_request(blocks, index=index), workers, at_s=float(index))
        workers[place].requests += 1
        workers[place].cached.update(blocks)
        idlest = workload.choice(workers)
        idlest.requests = max(0, idlest.requests - 2)
        places.append(place)
    return places


def test_the_same_seed_gives_the_same_choices() -> None:
    """All chance comes from the generator that a policy was made with."""
    for label in labels():
        assert choices(label, seed=3) == choices(label, seed=3), label


def test_labels_are_told_apart() -> None:
    """No two settings share a label."""
    assert len(labels()) == sum(len(peer.variants()) for peer in PEERS.values())


def test_an_unknown_label_is_refused_with_those_there_are() -> None:
    """The message helps whoever typed it."""
    with pytest.raises(ValueError, match=r"no peer 'dynamos'; there are: round-robin, .*dynamo"):
        make("dynamos")
