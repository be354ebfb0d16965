#!/usr/bin/env bash
# Test GH200 features (dataset in memory, batch ramp, placement hints) together with trainer features
# (attention backend, validation on request, audio). Exit codes: 0 passed, 1 a check failed, 2
# invalid options, 77 all checks were skipped.
source "$(dirname "${BASH_SOURCE[0]}")/feature_checks.sh"

HELP="usage: scripts/test_combined_features.sh [--backend NAME]... [--manual-validation] [--audio]
                                        [--allow-cpu] [--config FILE]

  --backend NAME       train with this attention backend, such as flash_attn_3
  --manual-validation  ask a running run for a validation (also --manual)
  --audio              stage audio in memory and give placement hints for its tensors
  --allow-cpu          skip hints, which need a GPU, if there is none
  --config FILE        run file to train (default: config/examples/minimal.json, and a miniature
                       Flux for attention backends)

Without any of the first three options, all are tested, with the backend sdpa."

CHOSEN=()
BACKENDS=()
ALLOW_CPU=0
while [[ $# -gt 0 ]]; do
    case "$1" in
        --backend) CHOSEN+=(backend) && BACKENDS+=("${2:?--backend needs a name}") && shift ;;
        --manual | --manual-validation) CHOSEN+=(manual) ;;
        --audio) CHOSEN+=(audio) ;;
        --allow-cpu) ALLOW_CPU=1 ;;
        --config) CONFIG="$(realpath "${2:?--config needs a file}")" && shift ;;
        -h | --help) echo "$HELP" && exit 0 ;;
        *) usage_error "$1 is not an option" ;;
    esac
    shift
done
[[ ${#CHOSEN[@]} -gt 0 ]] || CHOSEN=(backend manual audio)
[[ ${#BACKENDS[@]} -gt 0 ]] || BACKENDS=(sdpa)

GH200_OPTIONS=(
    --gh200_optimizations.enable_uvm_hints true --enable_batch_size_rampup
    --initial_effective_batch_size 8 --target_effective_batch_size 16 --batch_rampup_steps 4
    --cache_config.vae_cache_type unified_memory
)

# hints FOLDER NAME: report whether the run in a folder gave hints to the driver, as a part of a check.
hints() {
    local result
    result="$("$PYTHON" - "$1/events.jsonl" "$ALLOW_CPU" "$2" <<'PY'
import json
import sys
from pathlib import Path

import torch

events = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
counts = [event["hints"] for event in events if event["event"] == "unified_memory"][-1]
texts = [event["text"] for event in events if event["event"] == "notice"]
unused = [text for text in texts if text.startswith("managed memory is not in use")]
if counts["applied"]:
    print(f"PASS {sys.argv[3]}")
elif not torch.cuda.is_available():
    reason = "there is no GPU, so no hint can be applied"
    if sys.argv[2] == "1":
        print(f"SKIP {sys.argv[3]}: {reason}")
    else:
        print(f"FAIL {sys.argv[3]}: {reason} (to skip this, pass --allow-cpu)")
elif counts["failed"] or unused:
    print(f"FAIL {sys.argv[3]}: no hint was applied: {counts}. {' '.join(unused)}")
else:
    unsupported = counts["unsupported"]
    print(f"SKIP {sys.argv[3]}: no hint was applied; {unsupported} are not supported here")
PY
    )"
    report_part "${result%% *}" "${result#* }"
}

backend() {
    attention "$1" "${GH200_OPTIONS[@]}"
    grep -q '"event": "ramp_changed"' "attention-$1/events.jsonl"
    hints "attention-$1" "hints with attention backend $1"
}

manual() {
    manual_validation "${GH200_OPTIONS[@]}"
    grep -q '"event": "ramp_changed"' manual/events.jsonl
    hints manual "hints with validation on request"
}

staged_audio() {
    make_audio_files sounds
    "$PYTHON" - sounds "$ALLOW_CPU" <<'PY' | tee sounds.log
import sys

import torch

from gracetune.config.dataset_schema import DatasetSection
from gracetune.data.audio import decode_audio
from gracetune.data.dataset import CorruptionLog
from gracetune.data.dataset import open_dataset
from gracetune.gh200 import optimize_batch_for_gh200, set_uvm_hint_override, unified_pool
from gracetune.memory.managed_pool import ManagedPool

section = DatasetSection(type="in_memory", dataset_type="audio", instance_data_dir=sys.argv[1])
events = []
opened = open_dataset(section, 0, events.append, CorruptionLog(events.append))
assert len(opened.samples) == 2, opened.samples
clips = [
    decode_audio(opened.source.read(sample.key), 2, 44100, 44100) for sample in opened.samples
]
set_uvm_hint_override(True)
pool = unified_pool()
waves = torch.stack(clips)
if isinstance(pool, ManagedPool):
    with pool.allocating():
        waves = waves.to("cuda")
batch = {"waveform": waves, "audio_latents": {"left": waves[0]}}
report = optimize_batch_for_gh200(batch)
for placed in report.placed:
    print(placed.path, placed.role, *(f"{hint.verdict}: {hint.reason}" for hint in placed.hints))
assert {placed.role for placed in report.placed} == {"audio"}, report
assert len(report.placed) == 2 and not report.unknown, report
no_gpu = not torch.cuda.is_available() and sys.argv[2] == "1"
assert report or no_gpu, "a hint was not applied (without a GPU, pass --allow-cpu)"
print("hints", "skipped" if no_gpu else "applied")
PY
    grep -q '^waveform audio' sounds.log
    ! grep -q '^hints skipped' sounds.log || skip "there is no GPU, so no hint can be applied"
}

for chosen in $(printf '%s\n' "${CHOSEN[@]}" | awk '!seen[$0]++'); do
    case "$chosen" in
        backend)
            check_backends "ramp with attention backend" backend "${BACKENDS[@]}"
            ;;
        manual) check "ramp with validation on request" manual ;;
        audio) check "audio in memory with hints" staged_audio ;;
    esac
done
finish
