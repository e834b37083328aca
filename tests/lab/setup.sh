# shellcheck shell=bash
# What tests/lab.sh and tests/run.sh need on this machine, set up by themselves. Sourced.
#
# Each function may be repeated, and cut off anywhere: what marks a thing as done is written last.

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
export PATH

say() { printf 'lab: %s\n' "$*" >&2; }

die() {
    say "$*"
    exit 2
}

# require_lab: end here, with one sentence, where a machine cannot be booted at all
require_lab() {
    [ "$(uname -s)" = Linux ] || die "the lab boots Linux machines and needs Linux (this is $(uname -s))."
    [ "$(uname -m)" = x86_64 ] || die "the lab's packages are locked for x86_64 (this is $(uname -m)); on the Spark itself use inventories/spark.py."
    command -v apt-get >/dev/null || die "the lab sets itself up with apt-get, on Debian or Ubuntu; this machine has none."
    [ "$(id -u)" = 0 ] || die "the lab boots machines and needs root: run it as root or with sudo."
}

# ensure_packages COMMAND:PACKAGE... installs the packages whose command is not there
ensure_packages() {
    local pair missing=()
    for pair in "$@"; do
        case ${pair%%:*} in
            /*) [ -e "${pair%%:*}" ] || missing+=("${pair#*:}") ;;
            *) command -v "${pair%%:*}" >/dev/null || missing+=("${pair#*:}") ;;
        esac
    done
    [ ${#missing[@]} -eq 0 ] || apt_install "${missing[@]}"
}

apt_install() {
    command -v apt-get >/dev/null || die "please install: $* (this machine has no apt-get)."
    [ "$(id -u)" = 0 ] || die "please install, or run this as root once: $*."
    local log try
    log=$(mktemp /tmp/dsv4-apt.XXXXXX)
    say "installing $*"
    export DEBIAN_FRONTEND=noninteractive
    # An update that runs by itself after a boot holds the lists; it ends
    for try in 1 2 3 4 5 6; do
        apt-get -q update >"$log" 2>&1 && break
        grep -q 'Could not get lock' "$log" || break
        say "apt is busy, waiting ($try of 6)"
        sleep 10
    done
    # A run that was cut off can leave packages unpacked and not configured
    dpkg --configure -a >>"$log" 2>&1 || true
    if ! apt-get -q -y -o DPkg::Lock::Timeout=300 install --no-install-recommends "$@" >>"$log" 2>&1; then
        say "apt-get could not install $*: $(grep -m 1 '^E:' "$log" || tail -n 1 "$log") (see $log)"
        exit 1
    fi
    rm -f "$log"
}

# find_python sets PYTHON to an interpreter that is new enough and can make environments
find_python() {
    local candidate
    for candidate in python3 /usr/bin/python3 python3.13 python3.12 python3.11 python3.14; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            PYTHON=$candidate
            return 0
        fi
    done
    return 1
}

ensure_python() {
    find_python && return
    if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
        apt_install python3 python3-venv
        find_python && return
    fi
    die "Python 3.11 or later with venv is needed (this machine has $(python3 --version 2>/dev/null || echo none)); Debian 12 and Ubuntu 24.04 bring it with python3-venv."
}

# ensure_venv makes .venv what tests/requirements.txt says, and repairs a damaged one
ensure_venv() {
    local wanted stamp=$REPO/.venv/dsv4-stamp site begun=$SECONDS
    ensure_python
    mkdir -p "$REPO/.lab"
    # pip inherits the lock: an orphan of a killed run is waited for
    exec 9>"$REPO/.lab/venv.lock"
    flock -n 9 || { say "waiting for another run, which makes .venv"; flock 9; }
    wanted=$(
        cat "$REPO/requirements.txt" "$REPO/tests/requirements.txt" | sha256sum
        "$PYTHON" -c 'import sys; print(sys.version, sys.base_prefix)'
        printf '%s\n' "$REPO"
    )
    for site in "$REPO"/.venv/lib/python3*/site-packages; do :; done
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] ||
        ! "$REPO/.venv/bin/python" "$REPO/tests/lab/venv_check.py" "$site" >&2; then
        say "making .venv from tests/requirements.txt"
        rm -rf "$REPO/.venv"
        "$PYTHON" -m venv "$REPO/.venv" || exit 1
        "$REPO/.venv/bin/python" -m pip install --quiet --disable-pip-version-check \
            --requirement "$REPO/tests/requirements.txt" >"$REPO/.lab/pip.log" 2>&1 || {
            say "pip could not install tests/requirements.txt: $(grep -m 1 ERROR "$REPO/.lab/pip.log") (see .lab/pip.log)"
            exit 1
        }
        printf '%s\n' "$wanted" >"$stamp"
        say "made .venv: $((SECONDS - begun)) s"
    fi
    exec 9>&-
}
