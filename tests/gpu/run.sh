#!/usr/bin/env bash
# Everything that needs a CUDA GPU, on a bare machine with python3, torch, pytest, hypothesis, ml_dtypes and, for its part,
# compute-sanitizer. Usage: tests/gpu/run.sh WHEEL [test] [sanitize] [soak] [demo] [bench]; results go to $OUT (gpu-output).
# TOOLS and FAMILIES narrow what sanitize and bench do.
set -uo pipefail
cd "$(dirname "$0")/../.."
wheel=${1:?usage: tests/gpu/run.sh WHEEL [test] [sanitize] [soak] [demo] [bench]}
shift
steps=${*:-test sanitize soak demo bench}
export OUT=${OUT:-gpu-output} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
site=$(mktemp -d)
mkdir -p "$OUT"
python3 -m pip install --quiet --no-index --no-deps --target "$site" "$wheel" || exit
export PYTHONPATH=$site
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$OUT/machine.txt"
pytest=(python3 -m pytest -q -p no:cacheprovider -W default -m gpu --tb=short)
failed=0
for step in $steps; do
  case $step in
    test) "${pytest[@]}" tests/python/test_decode.py tests/python/test_cases_numeric.py tests/gpu 2>&1 | tee "$OUT/test.txt" | tail -n "${LINES_SHOWN:-40}" ;;
    sanitize)
      for tool in ${TOOLS:-memcheck racecheck synccheck initcheck}; do
        compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 5 python3 tests/gpu/small_set.py > "$OUT/$tool.txt" 2>&1
        code=$?
        echo "$tool: exit $code, $(tail -n 1 "$OUT/$tool.txt")"
        [ "$code" = 0 ] || failed=1
      done ;;
    soak) SPARSE_MLA_SOAK=${SPARSE_MLA_SOAK:-100000} timeout 500 "${pytest[@]}" tests/gpu/test_device.py -k soak 2>&1 | tee "$OUT/soak.txt" | tail -n 3 ;;
    demo) python3 -m sparse_mla demo --output "$OUT/demo" 2>&1 | tee "$OUT/demo.txt" | sed -n '/^Error of decode/,$p' ;;
    bench) python3 benches/bench_gpu.py --output "$OUT" ${FAMILIES:+--families $FAMILIES} && python3 benches/bench_warmup.py | tee "$OUT/warmup.md" ;;
  esac
  [ "${PIPESTATUS[0]}" = 0 ] || failed=1
done
exit $failed
