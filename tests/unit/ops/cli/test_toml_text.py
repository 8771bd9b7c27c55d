"""Records as TOML: what is shown can be read back, but for secrets."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.core.policy import LanePolicy, Policy, QuotaRow
from broker.service.config import Config, NatsConfig, loads
from ops.cli.toml_text import MASK, masked, toml_text


def test_configuration_and_back() -> None:
    """Tables, lists of tables, lists, empty lists and absent values survive."""
    config = Config(
        policy=Policy(
            models=("tiny", "meta-llama/Llama-3.1-8B"),
            lanes=(LanePolicy(name="acme", models=("tiny",)), LanePolicy(name="bolt", paused=True)),
            quotas=(QuotaRow(lane="acme", band=1, inflight_jobs_max=5), QuotaRow(tokens_per_min=9)),
        ),
        worker={"worker": "w1", "models": {"a b": 'quo"ted', "empty": ""}, "none": {}},
    )
    assert loads(toml_text(config)) == config


@given(st.text(min_size=1, max_size=20), st.text(max_size=20))
def test_any_text_and_back(key: str, value: str) -> None:
    """Keys and values of any characters are quoted as TOML wants it."""
    table = {key: value, "list": [value], "inner": {key: value}}
    if key in ("list", "inner", "password", "token", "api_key"):
        return
    try:
        (key + value).encode()
    except UnicodeEncodeError:
        return
    config = Config(policy=Policy(models=("m",), lanes=(LanePolicy(name="a"),)), worker=table)
    assert loads(toml_text(config)).worker == table


@pytest.mark.parametrize("secret", ["password", "api_key", "token"])
def test_secrets_are_hidden(secret: str) -> None:
    """At any depth, in TOML and in JSON; that there is none is no secret."""
    config = Config(
        nats=NatsConfig(user="u", password="hunter2"),
        worker={"deep": [{secret: "hunter2"}], secret: "hunter2"},
    )
    assert "hunter2" not in toml_text(config)
    assert "hunter2" not in str(masked(msgspec.to_builtins(config)))
    assert f'password = "{MASK}"' in toml_text(config)
    assert 'password = ""' in toml_text(Config())
