#!/usr/bin/env bash
# Move a fork onto a newer upstream, from backup to checklist: runs `gracetune port` step by step.
#
# Writes to the clone: patches/, MERGE_LOG.txt, ROLLBACK.sh, GH200_REBASE_CHECKLIST.md and, if there
# is uncommitted work, gh200-current.patch. Exit codes: 0 applied and validated; 1 stopped at a
# conflict, or a validation failed; 2 wrong input, or no validation commands.
set -euo pipefail

HELP="usage: ./execute_gh200_rebase.sh [--repo PATH] [--upstream REF] [--branch NAME] [--no-fetch]
                                  [--group NAME=PATTERN]... [--validate-upstream COMMAND]...
                                  [--validate-ours COMMAND]... [--validate-combined COMMAND]...
                                  [--skip-validation] [--continue | --rollback] [--yes]

  --repo PATH         the fork's clone, on the fork's branch (default: here)
  --upstream REF      the target (default: origin/main, fetched first)
  --branch NAME       the new branch (default: gh200-reintegration)
  --no-fetch          use upstream as it is in the clone
  --group, --validate-*  as in \`gracetune port extract\`
  --skip-validation   stop after the patches are applied
  --continue          continue after resolving a conflict
  --rollback          return to the fork as it was before the port
  --yes               do not ask for confirmation"

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
if [[ -z "${PYTHON:-}" ]]; then
    PYTHON="$HERE/.venv/bin/python"
    [[ -x "$PYTHON" ]] || PYTHON=python3
fi
export PYTHONPATH="$HERE/src${PYTHONPATH:+:$PYTHONPATH}" GIT_TERMINAL_PROMPT=0

REPO=.
UPSTREAM=origin/main
FETCH=1
VALIDATE=1
CONTINUE=0
ROLLBACK=0
EXTRACT=()
APPLY=()
YES=()
while [[ $# -gt 0 ]]; do
    case "$1" in
        --repo) REPO="${2:?--repo needs a path}" && shift ;;
        --upstream) UPSTREAM="${2:?--upstream needs a ref}" && shift ;;
        --branch) APPLY+=(--branch "${2:?--branch needs a name}") && shift ;;
        --no-fetch) FETCH=0 ;;
        --group | --validate-upstream | --validate-ours | --validate-combined)
            EXTRACT+=("$1" "${2:?$1 needs a value}") && shift
            ;;
        --skip-validation) VALIDATE=0 ;;
        --continue) CONTINUE=1 ;;
        --rollback) ROLLBACK=1 ;;
        --yes) YES=(--yes) ;;
        -h | --help) echo "$HELP" && exit 0 ;;
        *) echo "execute_gh200_rebase.sh: $1 is not an option (see --help)" >&2 && exit 2 ;;
    esac
    shift
done
REPO="$(cd "$REPO" && git rev-parse --show-toplevel)"

port() {
    "$PYTHON" -m gracetune port --repo "$REPO" "$@"
}

# Apply the patches, log the output, and write ROLLBACK.sh. On a conflict, write the checklist and exit.
apply() {
    local code=0
    port apply "$@" | tee "$REPO/MERGE_LOG.txt" || code=${PIPESTATUS[0]}
    if grep -q '^Backup branch:' "$REPO/MERGE_LOG.txt"; then
        cat >"$REPO/ROLLBACK.sh" <<END
#!/usr/bin/env bash
# Return to the fork as it was before the port. MERGE_LOG.txt names the backup branch.
export PYTHONPATH="$PYTHONPATH"
exec "$PYTHON" -m gracetune port --repo "$REPO" rollback "\$@"
END
        chmod +x "$REPO/ROLLBACK.sh"
    fi
    if [[ $code -ne 0 ]]; then
        [[ $code -ne 1 ]] || port checklist
        exit "$code"
    fi
}

if [[ $ROLLBACK -eq 1 ]]; then
    port rollback "${YES[@]}"
    exit 0
fi
if [[ $CONTINUE -eq 0 ]]; then
    echo "== Before"
    if ! git -C "$REPO" diff --quiet HEAD; then
        git -C "$REPO" diff --binary HEAD >"$REPO/gh200-current.patch"
        echo "uncommitted work is also saved in gh200-current.patch"
    fi
    if [[ $FETCH -eq 1 && "$UPSTREAM" == */* ]]; then
        git -C "$REPO" fetch --quiet "${UPSTREAM%%/*}" "${UPSTREAM#*/}"
    fi
    echo "== Patches"
    port extract --upstream "$UPSTREAM" "${EXTRACT[@]}"
    echo "== Plan"
    port plan
    echo "== Apply"
    apply "${APPLY[@]}" "${YES[@]}"
else
    echo "== Apply, continued"
    apply --continue
fi

code=0
if [[ $VALIDATE -eq 1 ]]; then
    echo "== Validate"
    port validate || code=$?
fi
echo "== Checklist"
port checklist
exit "$code"
