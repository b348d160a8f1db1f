#!/usr/bin/env bash
# Install the wheel into a fresh environment, and run there the demo, every command of the README and the tools that
# people already have. Options are those of pytest. Exit status 1 when something that should work does not.
#
#     scripts/newcomer.sh
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/source"
(cd "$root" && git ls-files -z | tar --null -T - -cf -) | tar -xf - -C "$work/source"
"${PYTHON:-python3}" -m venv "$work/venv"
python=$work/venv/bin/python
# torch's pin must be known before anything asks for torch: the constraints come with the first run of pip
"$python" -m pip wheel --disable-pip-version-check -q --no-deps -w "$work" "$work/source"
"$python" -m pip install --disable-pip-version-check -q -c "$root/constraints.txt" \
    "$(echo "$work"/expertcast-*.whl)[all,eval]" peft torchao fastapi uvicorn openai pytest
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1
(cd "$work" && "$work/venv/bin/expertcast" demo)
cd "$root"
"$python" -m pytest -v tests/package/test_readme.py tests/package/test_tools.py "$@"
