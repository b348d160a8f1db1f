#!/usr/bin/env bash
# What a newcomer does: installs the wheel into a fresh environment, runs every command of the README and the tools that
# people already have. Exit status 1 when something that should work does not.
#
#     scripts/newcomer.sh --out benchmarks/results/newcomer.json
#     PYTHON=.venv/bin/python scripts/newcomer.sh --skip-install --small --no-commands
#
# --skip-install takes the environment of $PYTHON as it is; the other options are those of `newcomer.py`.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
options=()
install=yes
for word in "$@"; do
    if [ "$word" = --skip-install ]; then install=no; else options+=("$word"); fi
done

if [ "$install" = yes ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    mkdir "$work/source"
    (cd "$root" && git ls-files -z | tar --null -T - -cf -) | tar -xf - -C "$work/source"
    "$python" -m venv "$work/venv"
    python=$work/venv/bin/python
    # torch's pin must be known before anything asks for torch: the constraints come with the first run of pip
    "$python" -m pip wheel --disable-pip-version-check -q --no-deps -w "$work" "$work/source"
    "$python" -m pip install --disable-pip-version-check -q -c "$root/constraints.txt" \
        "$(echo "$work"/expertcast-*.whl)[eval]" peft torchao fastapi uvicorn openai
else
    options+=(--allow-missing)
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1
"$python" "$root/scripts/newcomer.py" ${options[@]+"${options[@]}"}
