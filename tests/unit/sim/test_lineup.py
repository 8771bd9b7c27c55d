"""Who takes part."""

import pytest

from broker.sim.contestants import contestants
from broker.sim.errors import SimError
from broker.sim.lineup import chosen
from broker.sim.peers.registry import PEERS


def test_all_are_all() -> None:
    """Ours and every peer at all its knobs."""
    assert [one.label for one in chosen("all")] == [one.label for one in contestants()]


def test_defaults_are_ours_as_shipped_and_each_peer_once() -> None:
    """One of each family."""
    found = chosen("defaults")
    assert [one.label for one in found[:2]] == ["first_token", "weighted"]
    assert [one.family for one in found[2:]] == list(PEERS)


def test_labels_are_taken_once_in_their_order() -> None:
    """A peer's name and its default's label are the same contestant."""
    found = chosen("lmetric, first_token,round_robin,round-robin")
    assert [one.label for one in found] == ["lmetric", "first_token", "round-robin"]


def test_unknown_label_is_told() -> None:
    """With all labels there are."""
    with pytest.raises(SimError, match="no policy is called 'nobody'; there are: first_token"):
        chosen("first_token,nobody")
