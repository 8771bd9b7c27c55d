"""Knobs and their values from the command line to policies."""

import pytest

from broker.core.policy import Policy
from broker.sim.errors import SimError
from broker.sim.knobs import combinations, known, parse


def test_first_is_as_shipped_then_every_combination() -> None:
    """Two values of one knob and two of another are four policies, beside the base."""
    knobs = parse(["routing.bias=0,4", "order.wait_credit=0.2, 1"])
    found = combinations(Policy(), knobs)
    assert found[0].policy == Policy()
    assert found[0].label == "as shipped"
    assert [one.label for one in found[1:]] == [
        "routing.bias=0 order.wait_credit=0.2",
        "routing.bias=0 order.wait_credit=1",
        "routing.bias=4 order.wait_credit=0.2",
        "routing.bias=4 order.wait_credit=1",
    ]
    assert found[3].policy.routing.bias == 4
    assert found[3].policy.order.wait_credit == 0.2
    assert found[3].policy.bands == Policy().bands


def test_values_take_the_type_of_their_knob() -> None:
    """Words for flags, names for choices."""
    (_, off) = combinations(Policy(), parse(["routing.hold_for_affinity=false"]))
    assert off.policy.routing.hold_for_affinity is False
    (_, other) = combinations(Policy(), parse(["routing.policy=weighted"]))
    assert other.policy.routing.policy == "weighted"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("routing.bais=1", 'no such knob: routing.bais. Did you mean "routing.bias"?'),
        ("routing.bias", "NAME=VALUE,VALUE"),
        ("routing.bias=", "NAME=VALUE,VALUE"),
        ("leases.lease_s=1", "no such knob: leases.lease_s"),
        ("routing.bias=x", "routing.bias=x: Expected `float`"),
        ("routing.bias=-1", "routing.bias=-1: Expected `float` >= 0"),
        ("routing.bias=inf", "routing.bias=inf: it must be a finite number"),
        ("order.candidates_max=99999999999999999999", "Expected `int` <= 1000000"),
        ("routing.bias=" + ",".join(map(str, range(501))), "501 combinations are more than 500"),
    ],
)
def test_what_cant_be_swept_is_told(given: str, told: str) -> None:
    """A typing error, a value out of range, too many: said before anything runs."""
    with pytest.raises(SimError) as error:
        combinations(Policy(), parse([given]))
    assert told in str(error.value)


def test_a_knob_is_named_once() -> None:
    """The first values were dropped; of equal values one is run."""
    with pytest.raises(SimError, match=r"routing\.bias is named twice"):
        parse(["routing.bias=0,1", "routing.bias=2"])
    assert parse(["routing.bias=1,2,1"]) == {"routing.bias": ["1", "2"]}


def test_known_names_are_those_of_the_configuration() -> None:
    """Routing and order, as in the TOML file."""
    assert {"routing.bias", "order.wait_credit"} <= set(known())
