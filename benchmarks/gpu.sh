#!/usr/bin/env bash
# Checks and measures this project on a machine with a GPU and without a network. Prints each figure as it comes.
#
#   benchmarks/gpu.sh [--cpu] [correct] [speed]
#
# correct  Which attention kernels run, sampling in a fresh process, whether a resumed run is equal bit for bit, fp16,
#          DDP with NCCL, memory, out of memory, plan=true and model=auto against their runs, the tests for GPUs.
# speed    GPT-2 124M's training step against nanoGPT's and that of transformers, the mini model, a profile by kernel,
#          sampling, validation, and the wall clock of a run.
#
# Each takes at most 8 minutes. Without an argument both run, in this order. A part that reaches its time limit keeps
# the rows that it has printed. --cpu tries every part in a tiny size, in 45 to 50 s on two cores, to test the script.
#
# A rented machine often has PyTorch, Lightning, tensorboard, tiktoken, tokenizers, transformers and pytest, but lacks
# hydra-core, omegaconf (below 2.4), antlr4-python3-runtime 4.9.3, platformdirs and backports.zstd (until Python 3.13).
# Carry them there as wheels. antlr4-python3-runtime is published without one, so build it first:
#
#   pip wheel --no-deps -w wheels antlr4-python3-runtime==4.9.3 hydra-core==1.3.2 'omegaconf<2.4' platformdirs
#   pip download --no-deps -d wheels --only-binary :all: --python-version 3.12 backports.zstd   # the Python there
#   pip install --no-index --no-deps wheels/*.whl                                               # on that machine
#
# PYTHON is the Python (python3), and OUT the folder for rows.tsv and a log of each part (gpu-results). Runs and
# checkpoints go to a temporary folder, which is removed.
set -uo pipefail
export PYTHON=${PYTHON:-python3} OUT=${OUT:-gpu-results} PYTHONUNBUFFERED=1
export TORCH_LOGS=recompiles # in the logs, for the rows of recompilations

PACKAGES=(torch lightning hydra-core omegaconf antlr4-python3-runtime platformdirs tensorboard tiktoken tokenizers
  safetensors filelock fsspec charset-normalizer tqdm numpy pillow pytest)
CORRECT=(kernels:30 generate:45 resume:120 settings:35 memory:45 predictions:150 tests:55) # seconds: 480 together
SPEED=(steps:140 large_steps:120 mini:40 profile:25 sampling:50 scoring:20 wall_clock:85)  # also 480

row() { printf '%s\t%s\t%s\n' "$@" | tee -a "$OUT/rows.tsv"; } # part, what, figure

run() { # name, seconds, parts: run these parts in one process
  local name=$1 limit=$2 log=$OUT/$1.log code && shift 2
  timeout -k 5 "$limit" "$PYTHON" benchmarks/gpu.py "$@" 2> "$log" | tee -a "$OUT/rows.tsv"
  code=${PIPESTATUS[0]}
  case $code in
    0) ;;
    124 | 137) row "$name" "this part" "reached its limit of $limit s" ;;
    *) row "$name" "this part" "failed with exit code $code: $log" ;;
  esac
  row "$name" recompilations "$(grep -ac 'Recompiling function' "$log")"
  row "$name" "recompile limit reached" "$(grep -ac 'hit config.*recompile_limit' "$log") times"
}

cpu="" parts=()
for argument in "$@"; do
  case $argument in
    --cpu) cpu=1 && export CUDA_VISIBLE_DEVICES="" ;;
    correct) parts+=("${CORRECT[@]}") ;;
    speed) parts+=("${SPEED[@]}") ;;
    *) echo "gpu.sh: $argument is not known: give --cpu, correct or speed" >&2 && exit 2 ;;
  esac
done
[ ${#parts[@]} != 0 ] || parts=("${CORRECT[@]}" "${SPEED[@]}")

cd "$(dirname "$(realpath "$0")")/.." && mkdir -p "$OUT" && OUT=$(realpath "$OUT") && WORK=$(mktemp -d) || exit 2
export WORK
trap 'rm -rf "$WORK"' EXIT
missing=$("$PYTHON" - "${PACKAGES[@]}" <<'PY'
import importlib.metadata, sys

names = sys.argv[1:] + ["backports.zstd"] * (sys.version_info < (3, 14))
print(*[name for name in names if not any(importlib.metadata.distributions(name=name))])
PY
)
if [ -n "$missing" ]; then
  row machine "missing packages" "$missing"
  echo "gpu.sh: install the missing packages first: the first lines of this file say how" >&2 && exit 2
fi
if [ -n "$cpu" ]; then
  row machine "$(date -u +%F)" "a CPU, to test the script"
  run cpu 300 "${parts[@]%:*}" # in one process, because most of the time goes to imports
  exit
fi
describe='import torch; print(torch.cuda.get_device_name(), torch.__version__, "cuDNN", torch.backends.cudnn.version())'
machine=$("$PYTHON" -c "$describe" 2> /dev/null) || {
  echo "gpu.sh: $PYTHON finds no CUDA GPU: run this where it does, or try the script with --cpu" >&2 && exit 2
}
row machine "$(date -u +%F)" "$machine"
for part in "${parts[@]}"; do
  run "${part%:*}" "${part#*:}" "${part%:*}"
done
