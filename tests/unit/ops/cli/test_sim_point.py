"""Changes of the fleet, asked for on the command line: they happen, and the figures show it."""

import json
from pathlib import Path
from typing import Any

import pytest

from ops.cli import errors
from ops.cli.main import main

LOAD = ["--trace", "generated:shared_prompts?requests=600&requests_per_s=20"]
FEW = ["--workers", "3"]


def run_json(arguments: list[str], path: Path) -> Any:
    """Run a command with --report, and read what it wrote."""
    assert main([*arguments, "--report", str(path)]) == 0
    return json.loads(path.read_bytes())


def test_a_restart_shows_as_a_dip(tmp_path: Path) -> None:
    """Who restarts is empty: of the prompts after it less is cached. Without it there is no dip."""
    asked = ["sim", "run", *LOAD, *FEW, "--policy", "prefix-hash"]
    calm = run_json(asked, tmp_path / "calm.json")
    changed = run_json([*asked, "--change", "restart:0@15"], tmp_path / "changed.json")
    assert calm["hit_dip"] == 0
    assert changed["hit_dip"] != 0
    assert changed["cached_token_ratio"] < calm["cached_token_ratio"]


def test_a_comparison_says_what_happened_to_the_fleet(tmp_path: Path) -> None:
    """In JSON and on the page; every policy met it, and each has its dip."""
    asked = ["sim", "compare", *LOAD, *FEW, "--seeds", "1", "--jobs", "1"]
    asked += ["--policies", "first_token,lmetric", "--html", str(tmp_path / "a.html")]
    asked += ["--change", "lose:1@20", "--change", "join@15"]
    found = run_json(asked, tmp_path / "a.json")
    assert found["setting"]["changes"] == ["join@15", "lose:1@20"]
    assert all(one["hit_dip"] != 0 for one in found["policies"])
    assert all(one["requests"] == 600 for one in found["policies"])
    assert "join@15, lose:1@20 s" in (tmp_path / "a.html").read_text()


def test_the_load_is_of_the_fleet_that_a_run_begins_with(tmp_path: Path) -> None:
    """Workers that join later make no other capacity."""
    asked = ["sim", "compare", *LOAD, *FEW, "--seeds", "1", "--jobs", "1", "--policies", "lmetric"]
    calm = run_json(asked, tmp_path / "calm.json")
    changed = run_json([*asked, "--change", "join@0.5"], tmp_path / "changed.json")
    assert changed["load"]["capacity_tokens_s"] == calm["load"]["capacity_tokens_s"]


def test_a_change_that_cant_be_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """Code 2, before anything runs."""
    assert main(["sim", "run", *LOAD, *FEW, "--change", "restart:3@15"]) == errors.ExitCode.USAGE
    assert "there is no worker 3 then" in capsys.readouterr().err
