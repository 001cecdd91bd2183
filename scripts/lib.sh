# Shared by the scripts next to it; sourced, not run. Expects the repository's root as the current folder.
# shellcheck shell=sh

say() { printf '\n== %s\n' "$*" >&2; }
fail() { printf '%s: %s\n' "${0##*/}" "$1" >&2; exit "${2:-1}"; }

# Run apt-get without questions, and without starting the services that packages bring.
apt_install() {
    command -v apt-get > /dev/null || fail "$* must be installed, and there is no apt-get here" 3
    [ "$(id -u)" = 0 ] || fail "$* must be installed, and that needs root: apt-get install $*" 3
    policy=/usr/sbin/policy-rc.d
    ours=no
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' > "$policy"
        chmod 755 "$policy"
        ours=yes
    fi
    code=0
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        -o DPkg::Lock::Timeout=300 "$@"; } > /dev/null || code=$?
    if [ "$ours" = yes ]; then rm -f "$policy"; fi
    [ "$code" = 0 ] || fail "apt-get could not install $*" 3
}

# The newest Python from 3.11 on that is here.
find_python() {
    for name in ${PYTHON:-} python3 python3.15 python3.14 python3.13 python3.12 python3.11; do
        if command -v "$name" > /dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            command -v "$name"
            return
        fi
    done
    fail "Python 3.11 or newer is needed: apt-get install python3" 3
}

# Make .venv, where it is missing, with the project and the extra $1 (which may be empty) in it.
make_venv() {
    extra=$1
    python=$(find_python)
    # Without ensurepip a half-made folder would be left.
    if ! "$python" -c 'import ensurepip, venv' 2> /dev/null; then
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        say "installing python$version-venv"
        apt_install "python$version-venv"
    fi
    if ! [ -x .venv/bin/python ] || ! .venv/bin/python -c 'import pip' 2> /dev/null; then
        rm -rf .venv
        "$python" -m venv .venv
    fi
    wanted=$(cat pyproject.toml buildkit/__init__.py | cksum)" $extra"
    if [ "$(cat .venv/installed 2> /dev/null)" != "$wanted" ]; then
        say "installing buildkit${extra:+ with its $extra tools} into .venv"
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".${extra:+[$extra]}"
        printf '%s\n' "$wanted" > .venv/installed
    fi
}
