#!/usr/bin/env bash
# stage.sh NAME COMMAND...: run one stage of `make test` under a heading and print how long it took. Where STAGE_LOG names
# a file, the time is noted there too, for the summary of .ci/run.
set -uo pipefail
name=$1
shift
printf '\n== %s: %s\n' "$name" "$*"
started=$(date +%s)
"$@"
status=$?
seconds=$(($(date +%s) - started))
outcome=passed
[ "$status" -eq 0 ] || outcome="FAILED (exit code $status)"
printf '== %s: %s after %d s\n' "$name" "$outcome" "$seconds"
[ -z "${STAGE_LOG:-}" ] || printf '%6d s  %s: %s\n' "$seconds" "$name" "$outcome" >>"$STAGE_LOG"
exit "$status"
