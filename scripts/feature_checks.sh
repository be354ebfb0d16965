# Shared functions of the test_*_features.sh scripts, which source this file.
#
# A check is a function. It passes if every command in it succeeds; its output is shown if it fails.

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
FAILED=()

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
    local name="$1" code=0
    shift
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
    else
        FAILED+=("$name")
        echo "FAIL  $name (exit $code)"
        tail -n 25 "$WORK/check.log" | sed 's/^/  | /'
    fi
}

# Print the result; fail if no check ran.
finish() {
    echo "$PASSED passed, ${#FAILED[@]} failed"
    [[ ${#FAILED[@]} -eq 0 && $PASSED -gt 0 ]]
}

train() {
    "$PYTHON" "$ROOT/train.py" --config "$CONFIG" --max_train_steps "$STEPS" "$@"
}

# Train a few steps with an attention backend.
attention() {
    local backend="$1"
    shift
    train --attention_mechanism "$backend" --output_dir "attention-$backend" "$@" | tee attention.log
    grep -q "done  *$STEPS steps" attention.log
    grep -q "\"attention_mechanism\": \"$backend\"" "attention-$backend/run.json"
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
