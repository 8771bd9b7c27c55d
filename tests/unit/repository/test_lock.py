"""The lock files against pyproject.toml and against what is installed, without asking an index."""

import json
import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
RUNTIME_LOCK = ROOT / "requirements.lock"
TEST_LOCK = ROOT / "requirements-test.lock"

_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def declared(*extras: str) -> list[Requirement]:
    """Read from pyproject.toml what the project, its build and these extras ask for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = project["project"]["dependencies"] + project["build-system"]["requires"]
    for extra in extras:
        lines += project["project"]["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def pins(lock: Path) -> list[tuple[Requirement, int]]:
    """Read each pin of a lock file with the number of its hashes."""
    entries = re.sub(r"\\\n", "", re.sub(r"^\s*#.*\n", "", lock.read_text(), flags=re.MULTILINE))
    return [
        (Requirement(line.split("--hash")[0].strip()), len(_HASH.findall(line)))
        for line in entries.splitlines()
    ]


def pinned_versions(lock: Path) -> dict[str, str]:
    """Name the version that this lock gives to this interpreter, by distribution."""
    return {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for pin, _ in pins(lock)
        if pin.marker is None or pin.marker.evaluate()
    }


@pytest.mark.parametrize(
    ("lock", "extras"),
    [
        (RUNTIME_LOCK, ("embedded", "kv-events", "llama", "sim")),
        (TEST_LOCK, ("embedded", "kv-events", "llama", "sim", "test")),
    ],
    ids=["runtime", "test"],
)
def test_lock_answers_every_requirement(lock: Path, extras: tuple[str, ...]) -> None:
    """Each requirement of pyproject.toml has a pin that satisfies it."""
    versions = pinned_versions(lock)
    for requirement in declared(*extras):
        assert versions[canonicalize_name(requirement.name)] in requirement.specifier, requirement


@pytest.mark.parametrize("lock", [RUNTIME_LOCK, TEST_LOCK], ids=["runtime", "test"])
def test_lock_pins_exactly_with_hashes(lock: Path) -> None:
    """Every entry is `==` one version and carries at least one hash."""
    entries = pins(lock)
    assert len(entries) > len(declared())
    for pin, hashes in entries:
        assert re.fullmatch(r"==[^=,*]+", str(pin.specifier)), pin
        assert hashes >= 1, pin


def test_both_locks_agree() -> None:
    """What the test lock shares with the runtime lock it pins alike."""
    runtime, test = pinned_versions(RUNTIME_LOCK), pinned_versions(TEST_LOCK)
    assert runtime.items() <= test.items()


def test_lock_holds_the_whole_closure() -> None:
    """Whatever a pinned distribution needs on this machine is pinned too."""
    versions = pinned_versions(TEST_LOCK)
    for name in versions:
        for line in distribution(name).requires or []:
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                assert canonicalize_name(need.name) in versions, f"{name} needs {need}"


def test_environment_is_the_locked_one() -> None:
    """The tests run on the versions that the lock names, not on others that lie around."""
    installed = {name: distribution(name).version for name in pinned_versions(TEST_LOCK)}
    assert installed == pinned_versions(TEST_LOCK)


def test_the_javascript_clients_lock_names_no_registry() -> None:
    """Each package with its hash, and no address: each machine has a registry of its own."""
    lock = json.loads((ROOT / "tests" / "clients" / "js" / "package-lock.json").read_text())
    packages = [package for name, package in lock["packages"].items() if name]
    assert packages
    assert all(package["integrity"].startswith("sha512-") for package in packages)
    assert not any("resolved" in package for package in packages)
