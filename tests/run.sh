#!/usr/bin/env bash
# Every test of this repository: bash tests/run.sh [LAYER...]
set -uo pipefail

# shellcheck source=tests/lab/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/lab/setup.sh"
cd "$REPO" || exit 2

E2E_MACHINES=dsv4-lab-e2e
machines_are_ours=no

# A layer is here when it has tests
layers=(lint)
for layer in unit fixtures sources plan units e2e cross gpu spark; do
    [ -z "$(find "tests/$layer" -name 'test_*.py' -print -quit 2>/dev/null)" ] || layers+=("$layer")
done

usage() {
    echo "usage: bash tests/run.sh [LAYER...]"
    echo "layers: ${layers[*]} (without names, all of these but cross, gpu and spark)"
}

lint() {
    local bin=$REPO/.venv/bin status=0 scripts
    ensure_packages shellcheck:shellcheck
    mapfile -t scripts < <(
        grep -rlIE --exclude-dir={.git,.lab,.venv} --exclude='*.py' -m 1 '^#!.*\b(ba)?sh$|^# shellcheck shell=' \
            .ci deploy files templates tests
    )
    "$bin/ruff" format --check . || status=1
    "$bin/ruff" check . || status=1
    "$bin/mypy" || status=1
    shellcheck --external-sources "${scripts[@]}" || status=1
    return $status
}

layer() {
    case $1 in
        lint) lint ;;
        *) "$REPO/.venv/bin/pytest" "tests/$1" ;;
    esac
}

stop_what_we_started() {
    rm -rf "$logs"
    [ "$machines_are_ours" = yes ] || return
    # What was cut off may have left some; the tests themselves put theirs down
    bash tests/lab.sh status | grep -oE "^$E2E_MACHINES\S*" | while read -r name; do
        bash tests/lab.sh down "$name"
    done
}

chosen=("$@")
for name in "$@"; do
    case $name in
        -h | --help)
            usage
            exit 0
            ;;
    esac
    case " ${layers[*]} " in
        *" $name "*) ;;
        *)
            echo "no layer '$name'" >&2
            usage >&2
            exit 2
            ;;
    esac
done
if [ $# -eq 0 ]; then
    for name in "${layers[@]}"; do
        case $name in cross | gpu | spark) ;; *) chosen+=("$name") ;; esac
    done
fi

case " ${chosen[*]} " in *" e2e "*) require_lab ;; esac
case " ${chosen[*]} " in *" units "*) ensure_packages systemd-analyze:systemd ;; esac
case " ${chosen[*]} " in
    *" sources "* | *" cross "*) ensure_packages aarch64-linux-gnu-g++:g++-aarch64-linux-gnu ;;
esac
case " ${chosen[*]} " in
    *" cross "*) ensure_packages qemu-aarch64-static:qemu-user-static debootstrap:debootstrap ;;
esac
ensure_venv

logs=$(mktemp -d /tmp/dsv4-tests.XXXXXX)
trap stop_what_we_started EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

table=() failed_layers=0 passed=0 failed=0
for name in "${chosen[@]}"; do
    echo
    echo "== $name"
    begun=$SECONDS
    [ "$name" != e2e ] || machines_are_ours=yes
    # An interrupt is for the layer; its last words are still to be shown
    layer "$name" 2>&1 | tee --ignore-interrupts "$logs/$name"
    status=${PIPESTATUS[0]}
    # pytest's closing line: "1 failed, 2 passed, 1 error in 0.12s"
    closing=$(grep -E '(passed|failed|error)s?\b.* in [0-9.]+s' "$logs/$name" | tail -n 1)
    count() { grep -oE "[0-9]+ $1" <<<"$closing" | grep -oE '^[0-9]+' || echo 0; }
    passed=$((passed + $(count passed)))
    failed=$((failed + $(count failed) + $(count error)))
    verdict=passed
    [ "$status" -eq 0 ] || {
        verdict="FAILED ($status)"
        failed_layers=$((failed_layers + 1))
    }
    table+=("$(printf '%-10s %6s s  %s' "$name" "$((SECONDS - begun))" "$verdict")")
done

echo
printf '%s\n' "${table[@]}"
echo "$passed passed, $failed failed"
[ "$failed_layers" -eq 0 ]
