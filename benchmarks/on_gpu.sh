#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, step after step; each has a time limit, and a failure stops no other.
#
#     benchmarks/on_gpu.sh                     all steps
#     benchmarks/on_gpu.sh tests bench/outer   only steps whose names begin so
#     benchmarks/on_gpu.sh --list [NAME…]      only say what would be run
#
# $PYTHON is the Python to use (default: .venv/bin/python, else python3), $STEP_SECONDS a step's limit.
set -u
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
STEP_SECONDS=${STEP_SECONDS:-590}
OPERATORS=(msa_column_attention outer_product_mean)

# One line a step: its name, a tab, its command.
steps() {
    local operator part shape
    printf 'tests\t-m pytest -m gpu\n'
    for operator in "${OPERATORS[@]}"; do
        for part in check trials memcheck racecheck initcheck synccheck; do
            printf 'verify/%s/%s\t-m workbench verify %s --part %s\n' "$operator" "$part" "$operator" "$part"
        done
    done
    for operator in "${OPERATORS[@]}"; do
        for shape in seed af2 extra extra_long; do
            printf 'bench/%s/%s\t-m workbench bench %s --shape %s\n' "$operator" "$shape" "$operator" "$shape"
        done
    done
    printf 'variants\t-m benchmarks.variants\n'
    printf 'loader\tbenchmarks/loader.py\n'
    printf 'notebooks\t-m workbench.execute\n'
    printf 'report\t-m workbench report\n'
}

# Whether a step is among those asked for.
wanted() {
    local name=$1 prefix
    shift
    [ $# -eq 0 ] && return 0
    for prefix in "$@"; do
        [[ $name == "$prefix"* ]] && return 0
    done
    return 1
}

list=
if [ "${1:-}" = --list ]; then
    list=yes
    shift
fi
for prefix in "$@"; do
    if ! steps | cut -f 1 | grep -q "^$prefix"; then
        echo "on_gpu.sh: no step begins with $prefix; there are $(steps | cut -f 1 | paste -sd ' ')" >&2
        exit 2
    fi
done
if [ -z "$list" ] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "on_gpu.sh: these steps need an NVIDIA GPU, and $PYTHON finds none." >&2
    exit 1
fi

failures=0
summary=
while IFS=$'\t' read -r name command <&3; do
    wanted "$name" "$@" || continue
    if [ -n "$list" ]; then
        printf '%-40s %s %s\n' "$name" "$PYTHON" "$command"
        continue
    fi
    printf '\n==== %s: %s %s\n' "$name" "$PYTHON" "$command"
    start=$SECONDS
    # shellcheck disable=SC2086  # a command is words without quotes
    timeout --kill-after=10 "$STEP_SECONDS" "$PYTHON" $command
    status=$?
    case $status in
        0) outcome=passed ;;
        124 | 137) outcome="ran out of time" ;;
        *) outcome="failed with $status" ;;
    esac
    [ $status -eq 0 ] || failures=$((failures + 1))
    summary+=$(printf '%-40s %5d s  %s' "$name" $((SECONDS - start)) "$outcome")$'\n'
done 3< <(steps)

[ -n "$list" ] && exit 0
printf '\n==== summary\n%s%d failed\n' "$summary" "$failures"
[ "$failures" -eq 0 ]
