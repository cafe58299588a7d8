#!/usr/bin/env bash
# Measures what this project says about GPUs on a machine that has one, in at most 25 minutes, and prints one table:
#
#   benchmarks/gpu.sh [--cpu] [--text tinyshakespeare.txt] [PART ...]
#
# The parts are, in this order, all of them by default:
#   tests    the tests that need a GPU
#   step     GPT-2 124M's training step, compiled and not, in bf16, TF32 and fp32, against transformers
#   minute   a minute of `train.py experiment=gpt2_small`
#   resume   whether a resumed run equals an uninterrupted one, with and without trainer.deterministic
#   learn    seconds to 1.4697 nats per byte of tiny shakespeare (needs --text), which took nanoGPT 3 minutes on an A100
#   sample   tokens/s of GPT-2 124M by number of texts and precision, against transformers
#   score    tokens/s of validation by the size of its batches
#
# It runs in a bare clone without a network; a part whose packages are missing says which. PYTHON names the Python, and
# OUT the folder for results (gpu-results/): rows.tsv grows as figures come, so that a run that is cut off leaves what
# it had, and each part has a log. --cpu runs everything in tiny sizes on a CPU, to test this script.
set -uo pipefail
export PYTHON=${PYTHON:-python3} OUT=${OUT:-gpu-results} PYTHONUNBUFFERED=1

row() { printf '%s\t%s\t%s\n' "$@" | tee -a "$OUT/rows.tsv"; } # part, what, figure
rows() { while IFS=$'\t' read -r what figure; do row "$1" "$what" "$figure"; done; } # part; from standard input

train() { # part, name of the run, overrides
  local part=$1 name=$2 text=(data=python_docs) && shift 2
  [ -z "$TEXT" ] || text=(data=text "data.path=\"$TEXT\"")
  [ -z "$CPU" ] || set -- "$@" model.{d_model,context_length}=16 model.{num_layers,num_heads}=1 trainer.tokens_per_step=64
  rm -rf "${OUT:?}/runs/$name"
  "$PYTHON" train.py "$@" "${text[@]}" "run_dir=$OUT/runs/$name" "data.cache=$OUT/cache" ||
    { row "$part" "$name" "train.py failed with exit code $?" && return 1; }
}

figures() { # name of a run, format: its metrics.json, with memory in GiB and the median of work/mfu
  "$PYTHON" - "$OUT/runs/$1" "$2" <<'PY'
import csv, json, pathlib, statistics, sys

run = pathlib.Path(sys.argv[1])
shares = [float(value) for _, tag, value in csv.reader((run / "metrics.csv").open()) if tag == "work/mfu"]
figures = json.loads((run / "metrics.json").read_text())
figures |= {"mfu": statistics.median(shares or [float("nan")]), "gib": figures["peak_memory_bytes"] / 2**30}
print(sys.argv[2].format(**figures))
PY
}

variants() { # a benchmark's JSON file, names of figures: a line for each variant
  "$PYTHON" - "$@" <<'PY'
import json, sys

report = json.load(open(sys.argv[1]))
for part in [report, *report.values()]:
    for what, figures in (part.get("variants", {}) if isinstance(part, dict) else {}).items():
        print(what, ", ".join(f"{name} {figures[name]:,.4g}" for name in sys.argv[2:]), sep="\t")
PY
}

part_tests() {
  "$PYTHON" -m pytest -q -o addopts= -o filterwarnings=default -p no:cacheprovider -k "cuda or test_gpu" \
    tests/training/test_gpu.py tests/model/test_transformer.py
  row tests "exit code $?" "$(tail -n 1 "$OUT/tests.log")"
}

part_step() {
  local sizes=(--preset gpt2_small --seconds 60)
  [ -z "$CPU" ] || sizes=(--preset mini --seconds 0 --shape 2 32 --only "ours, Muon")
  "$PYTHON" benchmarks/train_step.py "${sizes[@]}" --json "$OUT/step.json" &&
    variants "$OUT/step.json" tokens_per_second time_to_ours share_of_peak peak_bytes | rows step
}

part_minute() {
  train minute minute experiment=gpt2_small horizon="${CPU:+0.0}60s" || return
  row minute experiment=gpt2_small "$(figures minute \
    '{tokens_per_second:,.0f} tokens/s, mfu {mfu:.3f}, {gib:.1f} GiB, val {val_loss:.3f} after {train_seconds:.1f} s')"
}

part_resume() {
  local compile fixed name sizes=(model.{num_layers,num_heads}=6 model.d_model=384 model.context_length=512)
  for compile in false true; do
    for fixed in true false; do
      [ -z "$CPU" ] || [ $compile-$fixed = false-true ] || continue
      name=resume-$compile-$fixed
      train resume "$name" "${sizes[@]}" trainer.tokens_per_step=16384 horizon=40steps trainer.keep_every=20 \
        'data.prompts=[]' trainer.deterministic=$fixed trainer.compile=$compile || continue
      rm -rf "$OUT/runs/$name-again" && cp -r "$OUT/runs/$name" "$OUT/runs/$name-again"
      (cd "$OUT/runs/$name-again/checkpoints" && mv step-00000020.ckpt last.ckpt && rm -f best.ckpt previous.ckpt)
      "$PYTHON" train.py "resume=$OUT/runs/$name-again"
      "$PYTHON" - "$name" "$OUT/runs/$name" "$OUT/runs/$name-again" <<'PY' | rows resume
import sys, torch

a, b = (torch.load(f"{run}/checkpoints/last.ckpt", map_location="cpu", weights_only=True) for run in sys.argv[2:])
worst = max(float((a["state_dict"][name] - weight).abs().max()) for name, weight in b["state_dict"].items())
_, compiled, fixed = sys.argv[1].split("-")
same = "equals the uninterrupted run bit for bit" if worst == 0 else f"weights differ by up to {worst:.1e}"
print(f"compile={compiled} deterministic={fixed}", f"at step {b['step']} of {a['step']}: {same}", sep="\t")
PY
    done
  done
}

part_learn() {
  local steps
  [ -n "$TEXT" ] || { row learn "not run" "give the file with --text" && return; }
  for steps in ${CPU:-2000 3000 4000}; do
    train learn "learn-$steps" experiment=shakespeare "horizon=${steps}steps" &&
      row learn "$steps steps" "$(figures "learn-$steps" '{val_nats_per_byte:.4f} nats per byte in {train_seconds:.1f} s')"
  done
}

part_sample() {
  local sizes=(--tokens 200 --seconds 60)
  [ -z "$CPU" ] || sizes=(--tokens 2 --seconds 0 --only "ours, fp32, 1 at once")
  "$PYTHON" benchmarks/generate.py "${sizes[@]}" --json "$OUT/sample.json" &&
    variants "$OUT/sample.json" tokens_per_second to_transformers peak_bytes | rows sample
}

part_score() {
  "$PYTHON" - <<'PY' | rows score
import os, sys, time

sys.path.insert(0, ".")
import numpy as np, torch
from gpt.hardware.device import choose_device
from gpt.model.transformer import GPT, GPTConfig
from gpt.sampling.scoring import score, eval_batch_tokens
from gpt.data.batches import validation_batches

T, sizes, config = 1024, (4096, 16384, 65536), GPTConfig(1024, 768, 12, 12)
if os.environ["CPU"]:
    T, sizes, config = 16, (64, 256), GPTConfig(16, 16, 1, 1, vocab_size=101)
model = GPT(config).set_compute_dtype(torch.bfloat16).to(choose_device())
tokens = np.random.default_rng(0).integers(config.vocab_size, size=4 * sizes[-1])
print(f"chosen\t{eval_batch_tokens(model):,} tokens at once", flush=True)
for size in sizes:
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        score(model, validation_batches(tokens, size // T, T, -1), len(tokens))
        times.append(time.perf_counter() - begin)
    print(f"{size:,} at once\t{len(tokens) / min(times):,.0f} tokens/s", flush=True)
PY
}

run() { # part, seconds, packages: run a part in a process of its own, for so long at most
  local part=$1 limit=$2 begin=$SECONDS missing code && shift 2
  [[ " $PARTS " == *" $part "* ]] || return
  missing=$("$PYTHON" -c 'import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if not u.find_spec(n)])' "$@")
  [ -z "$missing" ] || { row "$part" "not run" "these packages are missing: $missing" && return; }
  echo "--- $part, at most $limit s"
  timeout -k 10 "$limit" bash benchmarks/gpu.sh --inside "$part" 2>&1 | tee "$OUT/$part.log"
  code=${PIPESTATUS[0]}
  [ "$code" = 0 ] || row "$part" failed "exit code $code after $((SECONDS - begin)) s: $OUT/$part.log"
}

if [ "${1-}" = --inside ]; then # as `run` calls it
  "part_$2"
  exit
fi
export CPU="" TEXT="" PARTS=""
while [ $# -gt 0 ]; do
  case $1 in
    --cpu) CPU=1 && export CUDA_VISIBLE_DEVICES="" ;;
    --text) TEXT=$(realpath -e -- "${2-}") && shift || exit 2 ;;
    tests | step | minute | resume | learn | sample | score) PARTS+=" $1" ;;
    *) echo "gpu.sh: $1 is not known: the first lines of this file say what it takes" >&2 && exit 2 ;;
  esac
  shift
done
PARTS=${PARTS:-tests step minute resume learn sample score}
cd "$(dirname "$(realpath "$0")")/.." && mkdir -p "$OUT" && OUT=$(realpath "$OUT") || exit 2
if [ -z "$CPU" ] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2> /dev/null; then
  echo "gpu.sh: $PYTHON finds no CUDA GPU, or no PyTorch: run this where it does, or test the script with --cpu" >&2
  exit 2
fi
TRAINING=(torch lightning hydra omegaconf tensorboard tiktoken tokenizers safetensors filelock tqdm platformdirs)
row machine "$(date -u +%F)" "$(cd benchmarks && "$PYTHON" -c 'import measuring; print(measuring.describe_machine())')"
run tests 240 "${TRAINING[@]}" pytest
run step 420 torch
run minute 150 "${TRAINING[@]}"
run resume 180 "${TRAINING[@]}"
run learn 180 "${TRAINING[@]}"
run sample 240 torch numpy tqdm tiktoken tokenizers transformers
run score 90 torch numpy tqdm
echo && awk -F'\t' '{printf "%-8s %-44s %s\n", $1, $2, $3}' "$OUT/rows.tsv"
