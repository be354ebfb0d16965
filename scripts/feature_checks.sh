# Shared functions of the test_*_features.sh scripts, which source this file.
#
# A check is a function. It passes if every command in it succeeds; its output is shown if it fails.
# A check that calls `skip REASON` tests something that this machine does not have. It is reported as
# skipped, and does not count as passed. `report_part` reports a part of a check as a check of its own.

set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [[ -z "${PYTHON:-}" ]]; then
    PYTHON="$ROOT/.venv/bin/python"
    [[ -x "$PYTHON" ]] || PYTHON=python3
fi
export PYTHONPATH="$ROOT/src${PYTHONPATH:+:$PYTHONPATH}"
CONFIG="$ROOT/config/examples/minimal.json"
STEPS=10
WAIT_S="${WAIT_S:-300}"
WORK="$(mktemp -d)"
PASSED=0
SKIPPED=0
FAILED=()
SKIP_CODE=77

# Stop a run that a failed check left behind, and remove the working folder.
clean_up() {
    [[ ! -f "$WORK/running" ]] || kill "$(cat "$WORK/running")" 2>/dev/null || true
    rm -rf "$WORK"
}
trap clean_up EXIT

usage_error() {
    echo "$(basename "$0"): $1 (see --help)" >&2
    exit 2
}

# check NAME FUNCTION [ARGUMENT...]
check() {
    local name="$1" code=0 result part
    shift
    rm -f "$WORK/skipped" "$WORK/parts"
    # Not inside a condition: bash ignores `set -e` there, and a failing command would pass.
    set +e
    (
        set -e
        cd "$WORK"
        "$@"
    ) >"$WORK/check.log" 2>&1
    code=$?
    set -e
    if [[ $code -eq 0 ]]; then
        PASSED=$((PASSED + 1))
        echo "PASS  $name"
        [[ ! -f "$WORK/parts" ]] || while read -r result part; do
            case "$result" in
                PASS) PASSED=$((PASSED + 1)) ;;
                SKIP) SKIPPED=$((SKIPPED + 1)) ;;
                *) FAILED+=("$part") ;;
            esac
            echo "$result  $part"
        done <"$WORK/parts"
    elif [[ $code -eq $SKIP_CODE && -s "$WORK/skipped" ]]; then
        SKIPPED=$((SKIPPED + 1))
        echo "SKIP  $name: $(cat "$WORK/skipped")"
    else
        FAILED+=("$name")
        echo "FAIL  $name (exit $code)"
        tail -n 25 "$WORK/check.log" | sed 's/^/  | /'
    fi
}

# skip REASON: end the check that calls it.
skip() {
    echo "$1" >"$WORK/skipped"
    exit "$SKIP_CODE"
}

# report_part PASS|SKIP|FAIL TEXT: report a part of the check that calls it, if the rest passes.
report_part() {
    echo "$1 $2" >>"$WORK/parts"
}

# Print the result. Exit with 1 if a check failed, and with 77 if all were skipped.
finish() {
    local skipped=""
    [[ $SKIPPED -eq 0 ]] || skipped="$SKIPPED skipped, "
    echo "$PASSED passed, $skipped${#FAILED[@]} failed"
    [[ ${#FAILED[@]} -eq 0 ]] || exit 1
    [[ $PASSED -gt 0 ]] || exit "$SKIP_CODE"
}

train() {
    "$PYTHON" "$ROOT/train.py" --config "$CONFIG" --max_train_steps "$STEPS" "$@"
}

# Print the reason why an attention backend cannot be used here; nothing if it can.
missing_backend() {
    "$PYTHON" - "$1" <<'PY'
import sys

from gracetune.models.attention_backends import BACKENDS, find_backend

name = sys.argv[1]
if name not in BACKENDS:
    sys.exit(f"{name} is not an attention backend. Known: {', '.join(BACKENDS)}")
try:
    find_backend(name)
except (RuntimeError, ImportError) as error:
    print(error)
PY
}

# Write a run file for a miniature of a model that uses diffusers' attention dispatcher, which the
# demo model of minimal.json does not. `--config` replaces it.
dispatching_config() {
    if [[ "$CONFIG" != "$ROOT/config/examples/minimal.json" ]]; then
        cp "$CONFIG" dispatching.json
        return
    fi
    PYTHONPATH="$ROOT/tests:$PYTHONPATH" "$PYTHON" - <<'PY'
from pathlib import Path

from fakes.family_sessions import family_run

folder = Path("dispatching").absolute()
folder.mkdir(exist_ok=True)
train = {"batch_size": 2, "checkpoint_every": 0, "mixed_precision": "auto"}
run = family_run(folder, "flux", train=train, plan="auto")
Path("dispatching.json").write_text(run.model_dump_json(exclude_unset=True))
PY
    test -s dispatching.json
}

# Train a few steps with an attention backend.
attention() {
    local backend="$1" reason
    shift
    reason="$(missing_backend "$backend")"
    [[ -z "$reason" ]] || skip "$backend cannot be used here: $reason"
    dispatching_config
    CONFIG="$PWD/dispatching.json" train --attention_mechanism "$backend" \
        --output_dir "attention-$backend" "$@" | tee attention.log
    grep -q "done  *$STEPS steps" attention.log
    grep -q "\"attention_mechanism\": \"$backend\"" "attention-$backend/run.json"
}

# check_backends NAME FUNCTION BACKEND...: check each backend. A backend that this machine lacks is
# skipped, and sdpa is checked in its place.
check_backends() {
    local name="$1" function="$2" backend
    local checked=" "
    shift 2
    for backend in "$@"; do
        check "$name $backend" "$function" "$backend"
        checked+="$backend "
        if [[ -f "$WORK/skipped" && "$checked $* " != *" sdpa "* ]]; then
            check "$name sdpa, instead of $backend" "$function" sdpa
            checked+="sdpa "
        fi
    done
}

# Wait until a command succeeds; fail if the run ends before or the time is up.
wait_for() {
    local pid="$1" until=$((SECONDS + WAIT_S))
    shift
    until "$@" 2>/dev/null; do
        if ! kill -0 "$pid" 2>/dev/null || [[ $SECONDS -ge $until ]]; then
            echo "gave up waiting for: $*"
            return 1
        fi
        sleep 0.2
    done
}

# Request a validation from a running run, wait for it, then stop the run.
manual_validation() {
    local folder="manual" code=0 pid
    "$PYTHON" "$ROOT/train.py" --config "$CONFIG" --enable_manual_validation --output_dir "$folder" \
        --max_train_steps 1000000 --logging.every 1 "$@" >manual.log 2>&1 &
    pid=$!
    echo "$pid" >running
    wait_for "$pid" test -f "$folder/now/listening.json" || { cat manual.log; return 1; }
    wait_for "$pid" grep -q '"event": "step_done"' "$folder/events.jsonl" || { cat manual.log; return 1; }
    "$PYTHON" -m gracetune now validate "$folder"
    wait_for "$pid" grep -q '"event": "validated"' "$folder/events.jsonl" || { cat manual.log; return 1; }
    "$PYTHON" -m gracetune now stop "$folder"
    wait "$pid" || code=$?
    rm running
    echo "the run ended with exit code $code; 130 means stopped, with its state saved"
    [[ $code -eq 130 ]]
}

# Create two audio files with captions.
make_audio_files() {
    "$PYTHON" - "$1" <<'PY'
import math, struct, sys, wave
from pathlib import Path

folder = Path(sys.argv[1])
folder.mkdir()
for name, pitch in (("low", 220), ("high", 880)):
    with wave.open(str(folder / f"{name}.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        levels = (int(20000 * math.sin(2 * math.pi * pitch * i / 16000)) for i in range(16000))
        file.writeframes(b"".join(struct.pack("<h", level) for level in levels))
    (folder / f"{name}.txt").write_text(f"a {name} tone")
PY
}
