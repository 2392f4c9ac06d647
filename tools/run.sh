#!/bin/sh
# Shows the built program at work: attention of the sample tensors, its gradient, the check against
# the reference, and a picture denoised by one attention call.
set -eu
cd "$(dirname "$0")/.."
program=build/release/apps/fulgur/fulgur
results=build/results
mkdir -p "$results"

say() { printf '\n== %s\n' "$1"; }

say "Attention of the tensors in examples/, causal, and its gradient"
"$program" attend --q examples/q.npy --k examples/k.npy --v examples/v.npy --causal \
  --out "$results/out.npy" --lse "$results/lse.npy" \
  --dout examples/dout.npy --dq "$results/dq.npy" --dk "$results/dk.npy" --dv "$results/dv.npy"
echo "written to $results/: out.npy, lse.npy, dq.npy, dk.npy, dv.npy"

say "The engine against the reference in double precision"
"$program" check

say "The speed on this machine"
"$program" bench --grid quick

say "A picture denoised by one attention call over all its pixels"
build/release/examples/denoise "$results"
