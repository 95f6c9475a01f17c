#!/bin/sh
# Prints the path of each other Python that Quark is tested on and that starts here, one a line;
# names those that do not on standard error. One that a pyenv has, but has not put on the PATH, counts.
# usage: PYTHON=python3 sh .ci/find_pythons.sh
set -eu
mine=$("${PYTHON:-python3}" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
for version in 3.12 3.13 3.14; do
    [ "$version" != "$mine" ] || continue
    found=
    for python in "$(command -v "python$version" || :)" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python"$version"; do
        if [ -x "$python" ] && "$python" -c 'import ensurepip, venv, sqlite3' >/dev/null 2>&1; then
            found=$python
            break
        fi
    done
    if [ -n "$found" ]; then
        echo "$found"
    else
        echo "python$version: skipped, none that starts is here" >&2
    fi
done
