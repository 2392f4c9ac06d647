#!/bin/sh
# On a machine with an H100 or H200, PyTorch and compute-sanitizer: runs the GPU tests and the
# sanitizers, measures, and writes docs/performance/h100.{json.gz,md,svg} or h200.*, by the card.
#   tools/gpu_report.sh [PACKED]     a folder that tools/gpu_pack.sh made; builds one by default
# GPU_REPORT_DECODE: the PYTHONPATH of what decode calls are measured with, if it is another one.
# GPU_REPORT_WHEEL: a wheel of fulgur for this python3, of which the seconds to a result are measured.
# GPU_REPORT_TO names another folder for the report. What the tests and the sanitizers said goes to its checks.txt;
# GPU_REPORT_CHECKS names that file of an earlier run of the same kernels, and they are not run again.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
to=${GPU_REPORT_TO:-$root/docs/performance}
packed=${1:-$root/build/gpu}
if [ $# = 0 ]; then
  cmake -S "$root" --preset release
  cmake --build --preset release
  "$root/tools/gpu_pack.sh" "$root/build/release" "$packed"
fi
mkdir -p "$to"
card=$(nvidia-smi --query-gpu=name --format=csv,noheader | sed -n '1s/^NVIDIA \(H[0-9]*\).*/\1/p' | tr H h)
report=$to/${card:?nvidia-smi names no H100 or H200}.json.gz
checks=$to/checks.txt
if [ -d "$packed/cubins" ]; then
  FULGUR_CACHE_DIR=$(cd "$packed/cubins" && pwd)
  export FULGUR_CACHE_DIR
fi
with_libraries() { LD_LIBRARY_PATH="$packed:${LD_LIBRARY_PATH:-}" "$@"; }

# What a test's last words say with that it passed.
remarks() { sed -n 's/^host time: /; /p; s/^\[  SKIPPED \] \([0-9]*\) tests*\.$/, \1 skipped/p' "$1"; }

# check NAME COMMAND...: runs it, keeps its last words for the report, and fails with it.
check() {
  name=$1
  shift
  log="$to/$name.log"
  if with_libraries "$@" >"$log" 2>&1; then
    echo "$name: passed$(remarks "$log")" >>"$checks"
    rm "$log"
  else
    tail -40 "$log"
    echo "gpu_report.sh: $name failed; see $log" >&2
    exit 1
  fi
}

if [ -n "${GPU_REPORT_CHECKS:-}" ]; then
  checks=$GPU_REPORT_CHECKS
else
  : >"$checks"
  # All at once: most of their time is the reference's and the compiler's, on the host. What measures time waits.
  running=
  while read -r program filter; do
    case $program in
      attention_test | cuda_backward_tiles_test | cuda_device_test) shards=8 ;;
      cuda_lengths_test) shards=2 ;;
      *) shards=1 ;;
    esac
    shard=0
    while [ $shard -lt $shards ]; do
      name=tests_$program$([ $shards = 1 ] || echo "_$shard")
      check "$name" env GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard \
        "$packed/$program" --gtest_brief=1 --gtest_filter="$filter-*.HostTime" </dev/null &
      running="$running $!"
      shard=$((shard + 1))
    done
  done <"$packed/gpu_tests.txt"
  status=0
  for test in $running; do
    wait "$test" || status=1
  done
  [ $status = 0 ]
  # The processors of such machines have AMX, which those that test the CPU engine otherwise may lack.
  check tests_cpu_attention "$packed/attention_test" --gtest_brief=1 --gtest_filter='Small/*/cpu_*'
  check tests_cpu_bias "$packed/bias_test" --gtest_brief=1 --gtest_filter='*/cpu*'
  check tests_cpu_low_bit "$packed/low_bit_cache_test" --gtest_brief=1 --gtest_filter='*/cpu*'
  check host_time "$packed/cuda_device_test" --gtest_brief=1 --gtest_filter='*.HostTime'
  for package in torch jax cupy; do
    if [ -d "$packed/python" ] && python3 -c "import $package" 2>/dev/null; then
      check $package env PYTHONPATH="$packed/python:${PYTHONPATH:-}" python3 "$root/tests/cuda/gpu/${package}_test.py"
    fi
  done
  # Small shapes for every path of the kernels, which are compiled by now; each tool has an eighth of them in each of
  # eight processes. racecheck loses count of some barriers, and does not follow TMA and tensor cores: what it says is
  # recorded. The emulator looks for races in the same tests (tests/emulator/races.h), and fails.
  sanitize() {
    env GTEST_TOTAL_SHARDS=8 GTEST_SHARD_INDEX="$2" \
      compute-sanitizer --tool "$1" --error-exitcode 1 "$packed/cuda_sanitize_test" --gtest_brief=1
  }
  running=
  for shard in 0 1 2 3 4 5 6 7; do
    check sanitizer_memcheck_$shard sanitize memcheck $shard &
    running="$running $!"
    check sanitizer_synccheck_$shard sanitize synccheck $shard &
    running="$running $!"
    with_libraries sanitize racecheck $shard >"$to/sanitizer_racecheck_$shard.log" 2>&1 || true &
  done
  for test in $running; do
    wait "$test" || status=1
  done
  [ $status = 0 ]
  wait
  hazards=$(sed -n 's/.*RACECHECK SUMMARY: \([0-9]*\) hazards.*(\([0-9]*\) errors, \([0-9]*\) warnings).*/\1 \2 \3/p' \
    "$to"/sanitizer_racecheck_*.log | awk '{h += $1; e += $2; w += $3} END {
      if (NR != 8) exit 1; printf "%d hazards displayed (%d errors, %d warnings)", h, e, w}')
  echo "sanitizer_racecheck: $hazards" >>"$checks"
fi
measure() {
  with_libraries python3 "$root/bench/gpu_report.py" --library "$packed/libfulgur.so.0" --json "$report" "$@"
}
measure --checks "$checks" --parts forward backward errors
# A FlashAttention-3 that has caches may lack the backward pass, and the other way round.
PYTHONPATH="${GPU_REPORT_DECODE:-${PYTHONPATH:-}}" measure --add --parts decode decode_codes
# Of the Python package, which gpu_pack.sh takes along with a MODULE.
if [ -d "$packed/python" ]; then
  PYTHONPATH="$packed/python:${PYTHONPATH:-}" measure --add --parts host \
    ${GPU_REPORT_WHEEL:+--wheel "$GPU_REPORT_WHEEL"}
fi
python3 "$root/tools/gpu_table.py" --write "$report"
