#!/usr/bin/env bash
# A virtual Spark on this machine: bash tests/lab.sh up, and it answers.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: bash tests/lab.sh COMMAND [NAME]

  up        make and boot the machine, deploy, ask the model
  down      shut the machine down; up brings it back
  status    one line a machine
  ssh       a shell in the machine; ssh NAME -- COMMAND runs one there
  destroy   delete the machine; caches stay
  boot      only the machine, without a deploy
  prepare   the machine, the tiny pack and the hub, without a deploy

NAME is dsv4-lab where it is left out; machines run side by side.
DSV4_LAB_DIR (/var/lib/dsv4-lab) has the machines, DSV4_LAB_CACHE (/var/cache/dsv4-lab) the caches,
DSV4_LAB_MIRROR names a Debian mirror where this machine's own apt sources do not.
TEXT
}

# shellcheck source=tests/lab/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/lab/setup.sh"

case ${1-} in
    up | prepare | boot | down | status | ssh | destroy) ;;
    -h | --help | help)
        usage
        exit 0
        ;;
    *)
        usage >&2
        exit 2
        ;;
esac

require_lab
case $1 in
    up | prepare | boot)
        ensure_packages \
            debootstrap:debootstrap systemd-nspawn:systemd-container ssh:openssh-client curl:curl \
            /usr/share/keyrings/debian-archive-keyring.gpg:debian-archive-keyring \
            /etc/ssl/certs/ca-certificates.crt:ca-certificates
        ensure_venv
        ;;
    *) ensure_python ;;
esac

cd "$REPO"
PYTHONPATH=$REPO:$REPO/files/opt/dsv4/lib exec "$PYTHON" -m tests.lab.main "$@"
