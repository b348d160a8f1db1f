#!/usr/bin/env bash
# Everything that needs a GPU: the tests, and the commands that fill an empty result. Each has 8 minutes; a step that
# has ended well is not run again. Output and JSON of each go to the folder. Exit status 1 if a step failed.
#
#     scripts/gpu_day.sh benchmarks/results/gpu-DATE
set -uo pipefail
out=$(realpath -m "${1:?usage: scripts/gpu_day.sh FOLDER}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python -c 'import torch; raise SystemExit(not torch.cuda.is_available())' || { echo "no CUDA device" >&2; exit 2; }
mkdir -p "$out"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
failed=0
step() {
    local name=$1
    shift
    [ -e "$out/$name.done" ] && return
    echo "$name: $*"
    timeout 480 "$@" >"$out/$name.txt" 2>&1 && touch "$out/$name.done" || { echo "$name failed: $out/$name.txt"; failed=1; }
}
step tests python -m pytest -m gpu -v
step reference expertcast bench reference --device cuda --json "$out/reference.json"
for draft in none int4 auto; do
    step "draft-$draft" expertcast generate reference --device cuda --slots 192 --prompt "It is a truth" --new-tokens 256 \
        --draft "$draft" --json "$out/draft-$draft.json"
done
step life-size python -m benchmarks.life_size_files "$out" --layers 12
model=$out/qwen3-30b-a3b-12-layers-Q4_0.gguf
step bench expertcast bench "$model" --device cuda --cache both --predictor router_input --json "$out/bench.json"
step advice expertcast advise "$model" --device cuda --json "$out/advice.json"
exit $failed
