#!/usr/bin/env bash
# Trains cifar10-large from random weights, for 25 minutes of a GPU in all. Each call trains for at most MINUTES (9) of
# them and goes on where the last one stopped; the last one exports the checkpoint.
#
#     training/recipes/cifar10-large.sh DATA OUT     # DATA: a folder with CIFAR-10; OUT: for run and checkpoint
#
# On a processor, DEVICE=cpu IMAGES=64 BATCH=8 WARMUP=32 tries the commands out.
set -euo pipefail
data=$1 out=$2 resume=()
[ ! -e "$out/run.training/state.pt" ] || resume=(--resume)
train() {
  python -m linpix train cifar10-large --dropout 0.1 --augment flip --data "$data" --out "$out/run" "${resume[@]}" \
    --device "${DEVICE:-cuda}" --batch "${BATCH:-128}" --images "${IMAGES:-0}" --minutes "${TOTAL:-25}" \
    --max-minutes "${MINUTES:-9}" --warmup-images "${WARMUP:-50000}" --learning-rate 2e-3 \
    --final-learning-rate 0.002 --weight-decay 0.1 --conditional 0.3 --class-weight 100 --readings 2 --no-compile \
    --evaluate-minutes 30
}
train 2>&1 | tee -a "$out.log"
if tail -1 "$out.log" | grep -q 'the schedule is complete'; then
  python -m linpix export "$out/run" --data "$data" --out "$out/cifar10-large"
fi
