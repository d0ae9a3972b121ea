#!/usr/bin/env bash
# Trains mnist-large from random weights, for 20 minutes of a GPU in all. Each call trains for at most MINUTES (9) of
# them and goes on where the last one stopped; the last one exports the checkpoint.
#
#     training/recipes/mnist-large.sh DATA OUT     # DATA: a folder with MNIST; OUT: for run and checkpoint
#
# From random weights, since those that `--init mnist-conditional` would widen know the training images by heart.
# On a processor, DEVICE=cpu IMAGES=64 BATCH=8 WARMUP=32 tries the commands out.
set -euo pipefail
data=$1 out=$2 resume=()
[ ! -e "$out/run.training/state.pt" ] || resume=(--resume)
train() {
  python -m linpix train mnist-large --head categorical --dropout 0.1 --data "$data" --out "$out/run" "${resume[@]}" \
    --device "${DEVICE:-cuda}" --batch "${BATCH:-256}" --images "${IMAGES:-0}" --minutes "${TOTAL:-20}" \
    --max-minutes "${MINUTES:-9}" --warmup-images "${WARMUP:-100000}" --learning-rate 2e-3 \
    --final-learning-rate 0.002 --weight-decay 0.1 --conditional 0.4 --class-weight 40 --readings 4 --no-compile \
    --evaluate-minutes 30
}
train 2>&1 | tee -a "$out.log"
if tail -1 "$out.log" | grep -q 'the schedule is complete'; then
  python -m linpix export "$out/run" --data "$data" --out "$out/mnist-large"
fi
