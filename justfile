# Everything a newcomer, a developer and CI run. `just` alone lists it.
# A recipe that needs packages installs them first, from the lock file and into .venv, once.

set shell := ["bash", "-euo", "pipefail", "-c"]

venv := justfile_directory() / ".venv"
bin := venv / "bin"
export PIP_DISABLE_PIP_VERSION_CHECK := "1"

# The part of the suite that needs neither server nor engine.
fast := "tests/unit tests/contract -m 'not server'"
workers := "-n 2 --dist worksteal"

[private]
default:
    @just --justfile "{{ justfile() }}" --list --unsorted

[group("setup")]
[doc("Install all that development needs into .venv; quick when nothing changed")]
setup: (_install "requirements-test.lock")

[private]
_install lock:
    #!/usr/bin/env bash
    set -euo pipefail
    # What an installation depends on: the lock, and pyproject.toml up to the tools' settings.
    wanted() { cat "$1"; sed '/^\[tool\./,$d' pyproject.toml; }
    stamp="{{ venv }}/.installed-{{ lock }}"
    if cmp -s <(wanted "{{ lock }}") "$stamp"; then exit 0; fi
    if [ ! -x "{{ bin }}/python" ]; then python3 -m venv "{{ venv }}"; fi
    echo "Installing from {{ lock }} into .venv (once) ..." >&2
    "{{ bin }}/python" -m pip install -q --require-hashes -r "{{ lock }}"
    "{{ bin }}/python" -m pip install -q --no-deps --no-build-isolation -e .
    wanted "{{ lock }}" > "$stamp"
    # The test lock holds all that the other does.
    wanted requirements.lock > "{{ venv }}/.installed-requirements.lock"

# What the JavaScript client of the tests needs, where there is npm; without it its tests are skipped.
[private]
_js-client:
    #!/usr/bin/env bash
    set -euo pipefail
    cd tests/clients/js
    if cmp -s package-lock.json node_modules/.installed; then exit 0; fi
    if ! command -v npm > /dev/null; then
        echo "No npm here: the tests of the JavaScript client are skipped." >&2
    elif npm ci --no-audit --no-fund --loglevel=error >&2; then
        cp package-lock.json node_modules/.installed
    else
        echo "npm could not fetch its packages: the tests of the JavaScript client are skipped." >&2
    fi

[group("setup")]
[doc("Pin the dependencies anew (needs the package index); `--upgrade` takes newer releases")]
lock *args:
    #!/usr/bin/env bash
    set -euo pipefail
    "{{ bin }}/python" -m pip install -q uv
    compile() {
        "{{ bin }}/uv" pip compile -q pyproject.toml --universal --python-version 3.11 \
            --generate-hashes --no-annotate --no-emit-index-url --no-emit-find-links \
            --custom-compile-command "just lock" --group build --extra embedded --extra kv-events --extra llama --extra sim \
            {{ args }} "$@"
    }
    compile -o requirements.lock
    compile --extra test -c requirements.lock -o requirements-test.lock

[group("setup")]
[doc("Remove caches and outputs; .venv stays")]
clean:
    rm -rf tests/clients/js/node_modules
    rm -rf out build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis htmlcov .coverage*
    find . -name __pycache__ -type d -not -path "./.venv/*" -prune -exec rm -rf {} +

[group("run")]
[doc("A whole cluster on this machine for under a minute: chats and a batch, a live table, a summary")]
demo *args: (_install "requirements.lock")
    @"{{ bin }}/inferlane" demo {{ args }}

[group("run")]
[doc("The same cluster kept running for you; --gguf PATH serves a real model")]
up *args: (_install "requirements.lock")
    @"{{ bin }}/inferlane" up {{ args }}

[group("run")]
[doc("The demo under round robin and under first_token in turn, three times each, side by side")]
ab *args: (_install "requirements.lock")
    @"{{ bin }}/inferlane" ab {{ args }}

[group("run")]
[doc("Policies on a trace, ours and the field's, in virtual time: `just sim compare --trace excerpt:conversation`")]
sim *args: (_install "requirements.lock")
    @"{{ bin }}/inferlane" sim {{ args }}

[group("check")]
[doc("The whole suite, real NATS and real engines included")]
test *args: setup _js-client
    "{{ bin }}/pytest" {{ workers }} {{ args }}

[group("check")]
[doc("Unit and contract tests: seconds, no servers")]
test-fast *args: setup
    "{{ bin }}/pytest" {{ fast }} -q {{ workers }} {{ args }}

[group("check")]
[doc("Lint, format, types, layering, lock file")]
check: setup
    "{{ bin }}/ruff" check .
    "{{ bin }}/ruff" format --check .
    "{{ bin }}/basedpyright" --level error
    "{{ bin }}/lint-imports" --no-logo
    "{{ bin }}/pytest" -q tests/unit/repository

[group("check")]
[doc("Rewrite what ruff can put right by itself")]
format: setup
    "{{ bin }}/ruff" check --fix-only .
    "{{ bin }}/ruff" format .

[group("check")]
[doc("Draw ops/docs/states.md anew from the table that the code obeys")]
states: setup
    "{{ bin }}/python" -m ops.states_page

[group("check")]
[doc("Break the core in 100 sampled places, one at a time: do the unit tests notice? (out/mutants.md)")]
mutants *args: setup
    "{{ bin }}/python" -m tests.mutants {{ args }}

[group("check")]
[doc("Jobs a second through one broker, every decision on, as a share of a bare relay's; added latency")]
bench *args: setup
    "{{ bin }}/python" -m tests.bench.throughput {{ args }}
    "{{ bin }}/python" -m tests.bench.latency

[group("check")]
[doc("Break a cluster under load 200 times on purpose (half an hour); is any job lost? `--faults 20` is quick")]
chaos *args: (_install "requirements.lock")
    @"{{ bin }}/inferlane" chaos --report out/chaos.json {{ args }}

[group("check")]
[doc("Branch coverage of the core by the fast tests; under 95 % fails")]
cover *args: setup
    "{{ bin }}/pytest" {{ fast }} -q --cov=broker.core --cov-branch --cov-report=term \
        --cov-fail-under=95 {{ args }}
