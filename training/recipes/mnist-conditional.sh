#!/usr/bin/env bash
# Trains mnist-conditional on a processor: a trunk whose learning rate never falls, for as many days as there are, and
# weights to ship, each from a copy of the trunk whose rate falls over the last fifth of its images.
#
#     training/recipes/mnist-conditional.sh DATA OUT         # goes on with the trunk for MINUTES (600)
#     training/recipes/mnist-conditional.sh DATA OUT NAME    # makes OUT/NAME from a copy; the trunk may go on meanwhile
#
# A copy then learns from images that it draws itself, so that it needs fewer attempts.
# DATA: a folder with MNIST. The trunk begins with the shipped weights; INIT= begins with random ones.
# IMAGES=64 WARMUP=32 tries the commands out.
set -euo pipefail
data=$1 out=$2 name=${3:-}
train() {
  nice python -m linpix train mnist-conditional --layers 8 --data "$data" --no-compile --evaluate-minutes 30 "$@"
}
if [ -z "$name" ]; then
  begin=(--resume)
  if [ ! -e "$out/trunk.training/state.pt" ]; then
    begin=(--images 0 --batch 16 --learning-rate 1.2e-3 --warmup-images "${WARMUP:-4000}" --conditional 0.67
      --class-weight 60 --readings 2 --dropout 0.05 --augment shift)
    [ -z "${INIT-mnist-conditional}" ] || begin+=(--init "${INIT-mnist-conditional}")
  fi
  train --out "$out/trunk" "${begin[@]}" --max-minutes "${MINUTES:-600}" ${IMAGES:+--max-images "$IMAGES"}
else
  begin=(--fall-from "$out/trunk" --readings 6)
  [ ! -e "$out/$name.run.training/state.pt" ] || begin=(--resume)
  train --out "$out/$name.run" "${begin[@]}" ${IMAGES:+--max-images "$IMAGES"}
  [ -e "$out/$name.sure" ] || python -m linpix.training.preferences "$out/$name.run" --data "$data" --augment shift \
    --out "$out/$name.sure" ${IMAGES:+--images "$IMAGES"}
  python -m linpix export "$out/$name.sure" --data "$data" --out "$out/$name"
fi
