"""`inferlane config`: check says what is wrong and what to look at; show says what counts."""

import tomllib
from pathlib import Path

import orjson
import pytest

from ops.cli.main import main

VALID = '[policy]\nmodels = ["tiny"]\n[[policy.lanes]]\nname = "acme"\n'
ROW = "[[policy.quotas]]\nband = 1\ninflight_jobs_max = 9\n"


def _file(folder: Path, text: str) -> str:
    path = folder / "f.toml"
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def test_file_that_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and code 0."""
    file = _file(tmp_path, VALID + ROW)
    assert main(["config", "check", file]) == 0
    assert capsys.readouterr() == (f"{file}: ok: 1 lane, 1 model, 1 quota row\n", "")


def test_file_that_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every mistake is a line of its own, with file and line."""
    file = _file(tmp_path, VALID + 'models = ["x"]\nbands = [1, 1]\n')
    assert main(["config", "check", file]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0].startswith(f"inferlane: {file}:5: policy.lanes[0].models[0]: ")
    assert err.splitlines()[1].startswith(f"{file}:6: policy.lanes[0].bands[1]: ")


def test_tables_of_the_other_programs_are_judged_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file, one check: agents' and producers' own rules hold for their tables."""
    file = _file(tmp_path, '[worker]\nworker = "w1"\nslots = 0\n')
    assert main(["config", "check", file]) == 2
    assert f"{file}:3: worker.slots: 0 is not allowed" in capsys.readouterr().err
    file = _file(tmp_path, '[producer]\nlnae = "acme"\n')
    assert main(["config", "check", file]) == 2
    assert f'{file}:2: producer.lnae: no such key. Did you mean "lane"?' in capsys.readouterr().err
    good = _file(tmp_path, '[worker]\nworker = "w1"\nslots = 2\n')
    assert main(["config", "check", good]) == 0
    assert "0 lanes, 0 models, 0 quota rows, a worker" in capsys.readouterr().out


KEY = '[gateway.keys.alice]\nkey = "sk-alice-1"\nlane = '


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            '[worker]\nworker = "w"\nheartbeat_s = 3.0\n',
            "must be shorter than policy.leases.lease_s",
        ),
        ('[worker]\nworker = "w"\nrenew_s = 31.0\n', "at most half of streams.ack_wait_s (60 s)"),
        ('[worker]\nworker = "w"\nmodels = { tony = "t" }\n', 'Did you mean "tiny"?'),
        ('[producer]\nlane = "acne"\n', 'no such lane: "acne". Did you mean "acme"?'),
        (KEY + '"acne"\n', 'alice.lane: no such lane: "acne". Did you mean "acme"?'),
        (KEY + '"acme"\nband = 3\n', 'lane "acme" may not use band 3; it has 0, 1'),
        ("[gateway]\nport = 9470\n" + KEY + '"acme"\n', "9470 is broker.http_port, too"),
        (
            "[gateway]\nbodies_bytes_max = 2_000_000\n" + KEY + '"acme"\n',
            "must be at least body_bytes_max (7,900,000)",
        ),
    ],
)
def test_tables_that_contradict(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each program takes its own table; together nothing would run, and only one file shows it."""
    valid = VALID + "bands = [0, 1]\n" + ROW
    file = _file(tmp_path, valid + text)
    assert main(["config", "check", file]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert said.startswith(f"inferlane: {file}:")
    # Alone, without the lanes, a table is judged by itself.
    assert main(["config", "check", _file(tmp_path, text)]) == 0


@pytest.mark.parametrize(
    ("text", "mode", "told"),
    [
        (VALID, 0o600, "no [[policy.quotas]]"),
        (VALID + "paused = true\n" + ROW, 0o600, "every lane is paused: no job is taken"),
        (VALID + ROW + '[broker]\nhttp_host = "0.0.0.0"\n', 0o600, "listens on 0.0.0.0; it has no"),
        (VALID + ROW + '[nats]\nurl = "nats://a,nats://b"\n', 0o600, "2 servers and replicas = 1"),
        (VALID + ROW + '[nats]\nuser = "u"\npassword = "p"\n', 0o644, "others may read it: chmod"),
    ],
)
def test_what_may_not_be_meant(
    text: str, mode: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Allowed, and noted: the code is 0."""
    file = _file(tmp_path, text)
    Path(file).chmod(mode)
    assert main(["config", "check", file]) == 0
    notes = [one for one in capsys.readouterr().out.splitlines() if one.startswith("note: ")]
    assert len(notes) == 1
    assert told in notes[0]


def test_shown_as_toml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All values, defaults included, as a file that could be used."""
    assert main(["config", "show", _file(tmp_path, VALID)]) == 0
    told = tomllib.loads(capsys.readouterr().out)
    assert told["policy"]["lanes"][0]["weight"] == 1.0
    assert told["broker"]["leader_ttl_s"] == 5.0


def test_shown_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same for scripts, passwords hidden."""
    file = _file(tmp_path, VALID + '[nats]\nuser = "u"\npassword = "hunter2"\n')
    assert main(["config", "show", file, "--json"]) == 0
    told = orjson.loads(capsys.readouterr().out)
    assert told["nats"]["password"] == "***"
    assert told["policy"]["models"] == ["tiny"]
