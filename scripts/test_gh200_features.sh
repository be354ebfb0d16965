#!/usr/bin/env bash
# Test the features for machines like the GH200: diagnosis, managed memory, datasets staged in memory,
# batch ramp. Exit codes: 0 passed, 1 a check failed, 2 invalid options, 77 all checks were skipped.
source "$(dirname "${BASH_SOURCE[0]}")/feature_checks.sh"

HELP="usage: scripts/test_gh200_features.sh [--diagnostic] [--uvm] [--staging] [--ramp] [--allow-cpu]

  --diagnostic  run gh200_diagnostic.py, which checks this machine
  --uvm         run validate_uvm.py, which allocates managed memory
  --staging     train from a dataset in memory
  --ramp        train with a growing effective batch
  --allow-cpu   skip checks that need a GPU if there is none

Without any of the first four options, all are tested."

CHOSEN=()
ALLOW=()
while [[ $# -gt 0 ]]; do
    case "$1" in
        --diagnostic) CHOSEN+=(diagnostic) ;;
        --uvm) CHOSEN+=(uvm) ;;
        --staging) CHOSEN+=(staging) ;;
        --ramp) CHOSEN+=(ramp) ;;
        --allow-cpu) ALLOW=(--allow-cpu) ;;
        -h | --help) echo "$HELP" && exit 0 ;;
        *) usage_error "$1 is not an option" ;;
    esac
    shift
done
[[ ${#CHOSEN[@]} -gt 0 ]] || CHOSEN=(diagnostic uvm staging ramp)

# Checks that the diagnosis has skipped, such as those that need a GPU, are reported by name.
diagnostic() {
    local skipped
    "$PYTHON" "$ROOT/gh200_diagnostic.py" --output report.json "${ALLOW[@]}"
    skipped="$("$PYTHON" - <<'PY'
import json

checks = json.load(open("report.json"))["checks"]
assert any(each["status"] == "OK" for each in checks), checks
skipped = [each["name"] for each in checks if each["status"] == "SKIP"]
if skipped:
    print(f"{len(skipped)} of {len(checks)} checks: {', '.join(skipped)}")
PY
    )"
    test -s report.json
    [[ -z "$skipped" ]] || report_part SKIP "diagnosis: $skipped"
}

# Managed memory must have been allocated and used: the check of the pool passed.
uvm() {
    "$PYTHON" "$ROOT/validate_uvm.py" --output uvm.json "${ALLOW[@]}"
    "$PYTHON" - <<'PY' | tee uvm.log
import json

checks = {each["name"]: each for each in json.load(open("uvm.json"))["checks"]}
pool = checks["pool round trip"]
print(pool["status"], pool["text"])
PY
    ! grep -q '^SKIP ' uvm.log || skip "no managed memory was allocated: $(sed 's/^SKIP //' uvm.log)"
    grep -q '^OK ' uvm.log
}

# The first run draws the images; the second stages their folder.
staging() {
    STEPS=1 train --output_dir drawn
    train --output_dir staged --datasets.0.type in_memory \
        --datasets.0.instance_data_dir runs/minimal/data
    grep -q '"event": "stage_progress".*"stage": "staging"' staged/events.jsonl
    grep -q '"status": "done"' staged/events.jsonl
}

# Grow from 8 to 24 samples per optimizer step.
ramp() {
    train --output_dir ramp --enable_batch_size_rampup --initial_effective_batch_size 8 \
        --target_effective_batch_size 24 --batch_rampup_steps 6 --logging.every 1
    grep -q '"event": "ramp_changed"' ramp/events.jsonl
    grep '"event": "step_done"' ramp/events.jsonl | head -n 1 | grep -q '"samples": 8,'
    grep '"event": "step_done"' ramp/events.jsonl | tail -n 1 | grep -q '"samples": 24,'
}

for chosen in "${CHOSEN[@]}"; do
    case "$chosen" in
        diagnostic) check "diagnosis" diagnostic ;;
        uvm) check "managed memory" uvm ;;
        staging) check "dataset in memory" staging ;;
        ramp) check "batch size ramp" ramp ;;
    esac
done
finish
