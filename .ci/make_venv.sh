#!/bin/sh
# Makes a virtual environment with a pip that knows dependency groups.
# usage: PYTHON=python3 sh .ci/make_venv.sh DIR
set -eu
venv=$1
python=${PYTHON:-python3}

if ! command -v "$python" >/dev/null 2>&1; then
    echo "There is no $python here. Install Python 3.11 or newer, or say: make PYTHON=/path/to/python" >&2
    exit 1
fi
if ! "$python" -c '' 2>/dev/null; then
    echo "$python does not start: $("$python" -c '' 2>&1 | head -n 1). Say: make PYTHON=/path/to/python" >&2
    exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "$python is $("$python" -V 2>&1); Quark needs Python 3.11 or newer. Say: make PYTHON=/path/to/python3.11" >&2
    exit 1
fi
if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    echo "$python lacks venv or ensurepip. On Debian or Ubuntu: apt-get install python$version-venv" >&2
    echo "Elsewhere install the full Python, or say: make PYTHON=/path/to/another/python" >&2
    exit 1
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --upgrade "pip>=25.1"
