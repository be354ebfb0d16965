#!/usr/bin/env bash
# Test trainer features that do not depend on the GH200: attention backends, validation on request,
# audio files. Exit codes: 0 passed, 1 a check failed, 2 invalid options, 77 all checks were skipped.
source "$(dirname "${BASH_SOURCE[0]}")/feature_checks.sh"

HELP="usage: scripts/test_upstream_features.sh [--attention] [--manual-validation] [--audio]
                                        [--backend NAME]... [--config FILE]

  --attention          train a few steps with each attention backend
  --backend NAME       attention backend, such as flash_attn_3 (default: sdpa); may be repeated
  --manual-validation  ask a running run for a validation (also --manual)
  --audio              decode audio files
  --config FILE        run file to train (default: config/examples/minimal.json, and a miniature
                       Flux for attention backends)

Without any of the first three options, all are tested."

CHOSEN=()
BACKENDS=()
while [[ $# -gt 0 ]]; do
    case "$1" in
        --attention) CHOSEN+=(attention) ;;
        --manual | --manual-validation) CHOSEN+=(manual) ;;
        --audio) CHOSEN+=(audio) ;;
        --backend) BACKENDS+=("${2:?--backend needs a name}") && shift ;;
        --config) CONFIG="$(realpath "${2:?--config needs a file}")" && shift ;;
        -h | --help) echo "$HELP" && exit 0 ;;
        *) usage_error "$1 is not an option" ;;
    esac
    shift
done
[[ ${#CHOSEN[@]} -gt 0 ]] || CHOSEN=(attention manual audio)
[[ ${#BACKENDS[@]} -gt 0 ]] || BACKENDS=(sdpa)

audio_files() {
    make_audio_files sounds
    "$PYTHON" - sounds <<'PY' | tee sounds.log
import sys
from pathlib import Path

from gracetune.data.audio import decode_audio, probe_audio

for path in sorted(Path(sys.argv[1]).glob("*.wav")):
    facts = probe_audio(path.read_bytes())
    clip = decode_audio(path.read_bytes(), channels=2, length=44100, sample_rate=44100)
    print(path.name, facts, tuple(clip.shape))
    assert tuple(clip.shape) == (2, 44100) and facts.seconds == 1.0, facts
    assert 0.5 < float(clip.abs().max()) < 0.7, "the volume must be kept"
PY
    grep -q '^low.wav' sounds.log
}

for chosen in "${CHOSEN[@]}"; do
    case "$chosen" in
        attention)
            check_backends "attention backend" attention "${BACKENDS[@]}"
            ;;
        manual) check "validation on request" manual_validation ;;
        audio) check "audio files" audio_files ;;
    esac
done
finish
