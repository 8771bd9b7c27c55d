"""The configuration file: what is taken, what is refused and how that is told."""

import tomllib
from pathlib import Path

import msgspec
import pytest

from broker.core.policy import LanePolicy, Policy
from broker.service.config import Config, ConfigError, default_config, load, loads
from broker.service.queues import results_ages_s, topology_of

EXAMPLE = Path("ops/inferlane.toml")

SERVES = """\
# Cases are appended from line 11 on.

[policy]
models = ["tiny", "big"]
[[policy.lanes]]
name = "acme"
bands = [0, 1, 2]
models = ["tiny"]
[[policy.lanes]]
name = "bolt"
"""
"""A valid file."""


def _told(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loads(text, source="f.toml")
    return str(caught.value).splitlines()


def test_file_with_lanes_and_models_only() -> None:
    """All else has defaults."""
    config = loads(SERVES)
    assert config.policy.lanes[0] == LanePolicy(name="acme", bands=(0, 1, 2), models=("tiny",))
    assert config == Config(policy=msgspec.structs.replace(Policy(), **_served(config)))


def _served(config: Config) -> dict[str, object]:
    return {"models": config.policy.models, "lanes": config.policy.lanes}


def test_example_means_the_same_as_the_defaults() -> None:
    """Nobody who copies the example changes anything by that."""
    config = load(EXAMPLE)
    assert config == default_config(lanes=["main"], models=["tiny"])


def test_example_names_every_key() -> None:
    """A knob that is not in the example is a knob that nobody finds."""
    written = tomllib.loads(EXAMPLE.read_text())
    text = EXAMPLE.read_text()
    default = msgspec.to_builtins(default_config(lanes=["main"], models=["tiny"]))
    for table in ("nats", "broker", "streams"):
        assert written[table].keys() == default[table].keys()
    for table in ("pressure", "routing", "order", "leases", "breaker"):
        assert written["policy"][table].keys() == default["policy"][table].keys()
    assert written["policy"]["lanes"][0].keys() == default["policy"]["lanes"][0].keys()
    rows = msgspec.json.schema(Config)["$defs"]["QuotaRow"]["properties"]
    assert [key for key in rows if f"# {key} = " not in text] == []


def test_aliases_and_adapters_of_a_file() -> None:
    """As the example's comments write them."""
    text = 'aliases = { "gpt-4o-mini" = "tiny", "de" = "tiny-de" }\n'
    text += 'adapters = { tiny = ["tiny-de", "tiny-fr"] }\n'
    policy = loads(SERVES.replace("[[", text + "[[", 1)).policy
    assert policy.aliases == {"gpt-4o-mini": "tiny", "de": "tiny-de"}
    assert policy.adapters == {"tiny": ("tiny-de", "tiny-fr")}


def test_quota_rows_of_the_example() -> None:
    """The commented rows of the example are valid once their `#` is taken away."""
    lines = EXAMPLE.read_text().splitlines()
    first = lines.index("# [[policy.quotas]]")
    last = next(index for index in range(first, len(lines)) if not lines[index].startswith("#"))
    for index in range(first, last):
        lines[index] = lines[index].removeprefix("# ").removeprefix("#")
    assert [row.name for row in loads("\n".join(lines)).policy.quotas] == [
        "band=1",
        "band=3",
        "model=tiny lane=main",
        "lane=main",
    ]


def test_retention_of_the_example() -> None:
    """The commented table is valid once its `#` is taken away, and has every key."""
    lines = EXAMPLE.read_text().splitlines()
    first = lines.index("# [[retention]]")
    last = next(index for index in range(first, len(lines)) if not lines[index].startswith("#"))
    for index in range(first, last):
        lines[index] = lines[index].removeprefix("# ")
    config = loads("\n".join(lines))
    (kept,) = config.retention
    assert None not in msgspec.structs.astuple(kept)
    kept_as = {one.name: (one.max_age_s, one.max_bytes) for one in topology_of(config).streams}
    assert kept_as["RESULTS_main"] == (3600.0, 1_073_741_824)
    assert kept_as["DLQ_main"] == (86_400.0, 67_108_864)


def test_retention_of_one_lane_is_its_own() -> None:
    """Another lane, and what is not named, is as for all."""
    config = loads(SERVES + "[[retention]]\nlane = 'bolt'\nresults_age_s_max = 600.0\n")
    streams = {spec.name: spec for spec in topology_of(config).streams}
    assert streams["RESULTS_bolt"].max_age_s == 600.0
    assert streams["RESULTS_bolt"].max_bytes == streams["RESULTS_acme"].max_bytes
    assert streams["RESULTS_acme"].max_age_s == config.streams.results_age_s_max
    assert streams["DLQ_acme"].max_age_s == config.streams.dead_letters_age_s_max
    assert results_ages_s(config) == {"acme": config.streams.results_age_s_max, "bolt": 600.0}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", 'f.toml: policy.models: no model is named; give a list, such as models = ["tiny"]'),
        (
            "[broker]\nhttp_prt = 1\n" + SERVES,
            'f.toml:2: broker.http_prt: no such key. Did you mean "http_port"? Known here: name, ',
        ),
        (
            SERVES + "[[policy.lanes]]\nname = 'ac me'\n",
            "f.toml:12: policy.lanes[2].name: lane 'ac me' is not 1 to 64 of the characters ",
        ),
        (
            SERVES + "[[policy.lanes]]\nname = 'cluster'\n",
            'f.toml:12: policy.lanes[2].name: no lane may be called "cluster": its prompts would ',
        ),
        (
            SERVES + "[[policy.lanes]]\nname = 'acme'\n",
            'f.toml:12: policy.lanes[2].name: lane "acme" was given before (entry 0); keep one',
        ),
        (
            SERVES + "models = ['tiny', 'bigg']\n",
            'f.toml:11: policy.lanes[1].models[1]: no such model: "bigg". Did you mean "big"? ',
        ),
        (SERVES + "models = ['tiny', 'tiny']\n", 'f.toml:11: policy.lanes[1].models[1]: model "ti'),
        (
            SERVES + "bands = [1, 1]\n",
            'f.toml:11: policy.lanes[1].bands[1]: band "1" was given bef',
        ),
        (
            SERVES + "bands = []\n",
            "f.toml:11: policy.lanes[1].bands: a lane without a band can't b",
        ),
        (
            SERVES.replace("tiny", "", 1),
            "f.toml:4: policy.models[0]: '' is empty or too long for a",
        ),
        (SERVES.replace("big", "é" * 40), "f.toml:4: policy.models[1]: 'ééé"),
        (
            SERVES + "[[policy.quotas]]\nlane = 'acm'\ninflight_jobs_max = 1\n",
            'f.toml:12: policy.quotas[0].lane: no such lane: "acm". Did you mean "acme"? Known: ',
        ),
        (
            SERVES + "[[policy.quotas]]\nmodel = 'x'\ninflight_jobs_max = 1\n",
            'f.toml:12: policy.quotas[0].model: no such model: "x". Known: tiny, big',
        ),
        (
            SERVES + "[[policy.quotas]]\nlane = 'acme'\nband = 3\ninflight_jobs_max = 1\n",
            'f.toml:13: policy.quotas[0].band: no job can match: lane "acme" may not use band 3',
        ),
        (
            SERVES + "[[policy.quotas]]\nlane = 'acme'\nmodel = 'big'\ninflight_jobs_max = 1\n",
            'f.toml:13: policy.quotas[0].model: no job can match: lane "acme" may not use model "b',
        ),
        (
            SERVES + "[[policy.quotas]]\nlane = 'acme'\n",
            'f.toml:11: policy.quotas[0]: the row "lane=acme" limits nothing; give it a limit or ',
        ),
        (
            SERVES + "[[policy.quotas]]\nband = 3\nqueued_jobs_max = 1\n",
            "f.toml:13: policy.quotas[0].queued_jobs_max: batch queues are bounded by streams.batc",
        ),
        (
            SERVES + "[[policy.quotas]]\nband = 1\nresult_bytes_max = 1\n",
            "f.toml:13: policy.quotas[0].result_bytes_max: results are kept by lane: the row must ",
        ),
        (
            SERVES + "[[policy.quotas]]\nlane = 'acme'\nband = 1\nresult_bytes_max = 1\n",
            "f.toml:14: policy.quotas[0].result_bytes_max: results are kept by lane: the row must ",
        ),
        (
            SERVES + "[[policy.quotas]]\nqueued_jobs_max = 1\nlendable_share = 0.5\n",
            "f.toml:13: policy.quotas[0].lendable_share: needs inflight_jobs_max (or _per_worker):",
        ),
        (
            SERVES + "[[policy.quotas]]\nqueued_jobs_max = 1\nceiling_ratio = 2.0\n",
            "f.toml:13: policy.quotas[0].ceiling_ratio: needs inflight_jobs_max (or _per_worker): ",
        ),
        (
            SERVES
            + "[[policy.quotas]]\nband = 3\ninflight_jobs_max = 1\nceiling_ratio = 2.0\n"
            + "[[policy.quotas]]\nlane = 'acme'\ninflight_jobs_max = 1\nlendable_share = 0.5\n",
            'f.toml:14: policy.quotas[0].ceiling_ratio: nobody lends to "band=3": give another row',
        ),
        (
            SERVES + "[policy.pressure]\nborrow_wait_s = 9.0\n",
            "f.toml:11: policy.pressure.hold_batch_wait_s: 5 s must be at least borrow_wait_s (9",
        ),
        (
            SERVES + "[[policy.quotas]]\ninflight_jobs_max = 1\n" * 2,
            'f.toml:13: policy.quotas[1]: row "all" was given before (entry 0); keep one',
        ),
        (
            SERVES + "[[policy.bands]]\nguaranteed_share = 0.25\n" * 4,
            "f.toml:11: policy.bands: guaranteed shares add up to 1.00; they must leave some: bel",
        ),
        (
            SERVES + "[[policy.bands]]\nguaranteed_share = 0.25\n",
            "f.toml:11: policy.bands: a list of 1 is not allowed; it must be a list of exactly 4, ",
        ),
        (
            SERVES + "[broker]\nheld_reserve_ratios = [0.5, 0.5, 0, 0]\n",
            "f.toml:12: broker.held_reserve_ratios: the reserves add up to 1.00; they must leave",
        ),
        (
            SERVES + "[policy.leases]\nlease_s = 1.0\n",
            "f.toml:12: policy.leases.lease_s: 1 s must be longer than heartbeat_s (1 s)",
        ),
        (
            SERVES + "[policy.leases]\nrevoke_s = 3.0\n",
            "f.toml:12: policy.leases.revoke_s: 3 s must be longer than lease_s (3 s)",
        ),
        (
            SERVES + "[policy.aliases]\nshort = 'other'\nother = 'tiny'\n",
            'f.toml:12: policy.aliases.short: "other" is an alias itself, of "tiny"; name the mo',
        ),
        (
            SERVES + "[policy.aliases]\nself = 'self'\n",
            'f.toml:12: policy.aliases.self: "self" is an alias itself, of "self"; name the model ',
        ),
        (
            SERVES + "[policy.aliases]\nbig = 'tiny'\n",
            'f.toml:12: policy.aliases.big: "big" is a model itself; an alias needs a name of its ',
        ),
        (
            SERVES + "[policy.aliases]\n'gpt-4o-mini' = 'tin'\n",
            'f.toml:12: policy.aliases.gpt-4o-mini: no such model: "tin". Did you mean "tiny"? ',
        ),
        (
            SERVES + "[policy.aliases]\nde = 'tiny-d'\n[policy.adapters]\ntiny = ['tiny-de']\n",
            'f.toml:12: policy.aliases.de: no such model or adapter: "tiny-d". Did you mean "tiny',
        ),
        (
            SERVES + "[policy.aliases]\n'' = 'tiny'\n",
            "f.toml:12: policy.aliases.: an alias has 1 to 256 characters",
        ),
        (
            SERVES + "[policy.adapters]\ntin = ['de']\n",
            'f.toml:12: policy.adapters.tin: no such model: "tin". Did you mean "tiny"? Known: ',
        ),
        (
            SERVES + "[policy.adapters]\ntiny = ['de', 'big']\n",
            'f.toml:12: policy.adapters.tiny[1]: "big" is a model already; an adapter needs ',
        ),
        (
            SERVES + "[policy.aliases]\nde = 'tiny'\n[policy.adapters]\ntiny = ['de']\n",
            'f.toml:14: policy.adapters.tiny[0]: "de" is an alias already; an adapter needs ',
        ),
        (
            SERVES + "[policy.adapters]\ntiny = ['de']\nbig = ['de']\n",
            'f.toml:13: policy.adapters.big[0]: adapter "de" was given before, of "tiny"; keep one',
        ),
        (
            SERVES + "[policy.adapters]\ntiny = ['" + "x" * 257 + "']\n",
            "f.toml:12: policy.adapters.tiny[0]: an adapter's name has 1 to 256 characters",
        ),
        (
            SERVES + "[policy.breaker]\nopen_s_max = 1.0\n",
            "f.toml:12: policy.breaker.open_s_max: must be at least open_s (2 s)",
        ),
        (
            SERVES + "[policy.leases]\nretry_s_max = 0.1\n",
            "f.toml:12: policy.leases.retry_s_max: must be at least retry_base_s (0.5 s)",
        ),
        (
            SERVES + "[policy.leases]\nrun_s_max = 60.0\n",
            "f.toml:11: policy.leases.stall_s: must be at most run_s_max (60 s), or it never acts",
        ),
        (
            SERVES + "[broker]\nrenew_s = 31\n",
            "f.toml:12: broker.renew_s: must be at most half of streams.ack_wait_s (60 s), so that",
        ),
        (SERVES + "[nats]\npassword = 'x'\n", "f.toml:12: nats.password: a password needs a user"),
        (
            SERVES + "[nats]\nuser = 'u'\ncreds_file = 'x'\n",
            "f.toml:13: nats.creds_file: give either creds_file or user and password, not both",
        ),
        (
            SERVES + "[broker]\nwindow_batch_jobs = 20_000\n",
            "f.toml: streams.ack_pending_jobs_max: must be at least 20,000: the largest window (20",
        ),
        (
            SERVES + "[[policy.quotas]]\ninflight_jobs_max = 1000\nqueued_jobs_max = 20_000\n",
            "f.toml: streams.jobs_per_subject_max: must be at least 21,000: the largest queued_job",
        ),
        (
            SERVES + "[nats]\nreplicas = 2\n",
            "f.toml:12: nats.replicas: 2 is not allowed; it must b",
        ),
        (
            SERVES + "[broker]\nname = 'a.b'\n",
            'f.toml:12: broker.name: "a.b" is not allowed; it mu',
        ),
        (SERVES + "[broker]\nhttp_port = 65536\n", "f.toml:12: broker.http_port: 65536 is not all"),
        (
            SERVES + "[[retention]]\nlane = 'acm'\n",
            'f.toml:12: retention[0].lane: no such lane: "acm". Did you mean "acme"?',
        ),
        (
            SERVES + "[[retention]]\nlane = 'acme'\n" * 2,
            'f.toml:14: retention[1].lane: lane "acme" was given before',
        ),
        (SERVES + "worker = 3\n", "f.toml:11: policy.lanes[1].worker: no such key."),
        ("worker = 3\n", "f.toml:1: worker: 3 is not allowed; it must be a table"),
    ],
)
def test_mistake(text: str, told: str) -> None:
    """Each mistake is told first by its line and key, then by what to do."""
    assert _told(text)[0].startswith(told)


def test_all_disagreements_are_told_at_once() -> None:
    """Whoever has made three mistakes learns of three."""
    rows = "[[policy.quotas]]\nlane = 'x'\n[[policy.quotas]]\nlane = 'y'\nband = 1\n"
    assert len(_told(SERVES + rows)) == 4


def test_values_at_their_bounds() -> None:
    """What a cross-check allows at its edge is allowed."""
    config = loads(
        SERVES
        + """[[policy.quotas]]
        inflight_jobs_max = 1000
        queued_jobs_max = 19_000
        [broker]
        renew_s = 30
        window_online_jobs = 9000
        [policy.leases]
        run_s_max = 120
        """
    )
    assert config.streams.ack_pending_jobs_max == 9000 + 1000
    assert config.streams.jobs_per_subject_max == 19_000 + 1000


def test_file_of_a_worker_only() -> None:
    """A worker's host needs no lanes in its file; its table is left as it stands."""
    assert loads("[worker]\nworker = 'w1'\nslots = 'many'\n").worker == {
        "worker": "w1",
        "slots": "many",
    }


def test_worker_beside_half_a_policy() -> None:
    """Once models are named, lanes are missed."""
    text = "[worker]\nworker = 'w1'\n[policy]\nmodels = ['tiny']\n"
    assert _told(text) == [
        "f.toml:3: policy.lanes: no lane is named; add a [[policy.lanes]] table with a name"
    ]


def test_file_that_is_not_there(tmp_path: Path) -> None:
    """The path is told, and why it can't be read."""
    with pytest.raises(
        ConfigError, match=r"absent.toml: cannot be read: no such file or directory"
    ):
        load(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match=r"cannot be read: is a directory"):
        load(tmp_path)


def test_defaults_for_a_bad_lane() -> None:
    """Names given on a command line are judged like names in a file."""
    with pytest.raises(ConfigError, match=r"^configuration: policy.lanes\[0\].name: lane 'a b'"):
        default_config(lanes=["a b"], models=["tiny"])


def test_four_thousand_lanes() -> None:
    """A large file is read in a moment, and a mistake at its end is still told by its line."""
    lanes = "".join(f"[[policy.lanes]]\nname = 'lane-{number}'\n" for number in range(4000))
    quotas = "".join(
        f"[[policy.quotas]]\nlane = 'lane-{number}'\ninflight_jobs_max = 9\n"
        for number in range(4000)
    )
    text = f"[policy]\nmodels = ['m']\n{lanes}{quotas}"
    assert len(loads(text).policy.quotas) == 4000
    assert _told(text + "x = 1\n")[0].startswith("f.toml:20003: policy.quotas[3999].x: no such key")


PRESSED = """[policy.pressure]
borrow_wait_s = 1e-9
hold_batch_wait_s = 1e-9
refuse_batch_wait_s = 1e-9
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "[policy.routing]\nkv_fill_ratio_max = 0\n",
            "no worker has room for a prompt; write 0.95",
        ),
        ("[policy.routing]\nkv_fill_ratio_max = 0.09\n", "0.09 is too little"),
        ("[policy.routing]\nprefill_tokens_s = 1e-9\n", "every wait would be endless"),
        ("[policy.routing]\ndecode_tokens_s = 1e-9\n", "every answer would be endless"),
        ("[policy.leases]\nheartbeat_s = 1e-9\n", "would do nothing else; write 1.0"),
        ("[policy.leases]\nstall_s = 1e-9\n", "before its first token; write 120.0"),
        ("[policy.leases]\nstall_s=0.05\nrun_s_max = 0.05\n", "as soon as it runs; write 3600.0"),
        ("[policy.leases]\ndispatch_answer_s = 1e-9\n", "no worker answers an order so soon"),
        (PRESSED, "all batch would be refused"),
        ("[[policy.quotas]]\ninflight_jobs_max = 0\n", "paused = true in the lane's table"),
        ("[[policy.quotas]]\nband = 1\ninflight_tokens_max = 0\n", "leave 1 out of the bands"),
        ("[[policy.quotas]]\nmodel = 'big'\ntokens_per_min = 0\n", "leave the model out"),
        (
            "[[policy.quotas]]\nlane = 'bolt'\nresult_bytes_max = 0\n",
            "no job of lane bolt ever run",
        ),
        ("[[policy.quotas]]\nqueued_jobs_max = 0\n", "0 refuses every job that the row matches"),
        ("[broker]\nloop_stuck_s_max = 0.1\n", "would end itself again and again; write 60.0"),
        ("[broker]\nreconcile_s = 1e12\n", "1e+12 s is longer than any clock runs"),
        ("[worker]\ndrain_s_max = 1e12\n", "worker.drain_s_max: 1e+12 s is longer than any clock"),
        ("[streams]\nresults_age_s_max = 1e10\n", "at most 1,000,000,000 s"),
        ("[streams]\nlane_bytes_max = 2_000_000\n", "a job of body_bytes_max (7,900,000 bytes)"),
        ("[streams]\nbatch_bytes_max = 2_000_000\n", "a job of body_bytes_max (7,900,000 bytes)"),
        ("[streams]\nresults_bytes_max = 2_000_000\n", "never end; write 16_777_216 at least"),
        (
            "[[retention]]\nlane = 'bolt'\ndead_letters_bytes_max = 2_000_000\n",
            "retention[0].dead_letters_bytes_max: a result of 7,900,000 bytes hardly fits",
        ),
        ("[policy.routing]\nsize_weight = 1e7\n", "1e+07 drowns all else that is weighed"),
        ("[policy.routing]\nbias = 1e7\n", "1e+07 drowns all else that is weighed"),
        ("[policy.order]\nwait_credit = 1e7\n", "1e+07 drowns all else that is weighed"),
    ],
)
def test_values_under_which_nothing_would_run(text: str, told: str) -> None:
    """Refused, by line and key, with what to write instead: they were taken without a word."""
    said = _told(SERVES + text)
    assert any(told in line for line in said)
    assert all(line.startswith("f.toml:") for line in said)


@pytest.mark.parametrize("weight", [1e-9, 1e9])
def test_a_weight_that_is_all_or_nothing(weight: float) -> None:
    """A lane is stopped by pausing it, not by a share too small to count."""
    (said,) = _told(SERVES + f"weight = {weight}\n")
    assert "policy.lanes[1].weight" in said
    assert "paused = true to stop a lane" in said


@pytest.mark.parametrize("wait_s_max", [1e-9, 0.009])
def test_a_wait_that_is_over_at_once(wait_s_max: float) -> None:
    """Every job of the band would expire before it could be placed."""
    bands = "[[policy.bands]]\nguaranteed_share = 0.0\n" * 3
    last = f"[[policy.bands]]\nguaranteed_share = 0.0\nwait_s_max = {wait_s_max}\n"
    (said,) = _told(SERVES + bands + last)
    assert "policy.bands[3].wait_s_max" in said
    assert "is over before a job can be placed" in said


def test_least_values_that_run() -> None:
    """Each bound itself is allowed; 0 turns off what 0 is said to turn off."""
    config = loads(
        SERVES
        + """weight = 1e-6
        [[policy.quotas]]
        inflight_jobs_max = 1
        inflight_tokens_max = 1
        tokens_per_min = 1
        queued_jobs_max = 1
        [broker]
        loop_stuck_s_max = 0
        decision_log_bytes_max = 0
        reconcile_s = 1e9
        [streams]
        lane_bytes_max = 7_900_000
        results_bytes_max = 16_777_216
        [policy.routing]
        kv_fill_ratio_max = 0.1
        hot_uses_min = 0
        replicas_max = 0
        index_entries_max = 0
        size_weight = 0
        [policy.breaker]
        failures_max = 0
        """
    )
    assert config.policy.routing.kv_fill_ratio_max == 0.1
