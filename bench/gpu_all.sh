#!/bin/sh
# Everything that wants a GPU, in calls of less than ten minutes each, in this order:
#
#     bench/gpu_all.sh smoke OUT       two minutes: does each fast path run, and is it right
#     bench/gpu_all.sh checks OUT      tests/gpu, then the promises as figures
#     bench/gpu_all.sh backends OUT    Qwen3-8B: the three LoRA backends at several lengths
#     bench/gpu_all.sh speed OUT       Qwen3-8B: tenants, phases, memory
#     bench/gpu_all.sh peft OUT        Qwen3-8B against PEFT, then decoding
#
# Run from the root of the repository; PYTHON picks the interpreter, which needs torch, transformers, peft,
# safetensors and numpy, and pytest for the first. Nothing of ours has to be installed. What was measured
# before a part ran out of time is in OUT.
set -u
call=${1:?smoke, checks, backends, speed or peft}
out=${2:?a folder for what is measured}
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONUNBUFFERED=1 PYTHONPATH=.:workers:scheduler
failed=0

part() { # seconds, name, command…
    limit=$1 name=$2
    shift 2
    echo "== $name"
    if timeout -k 10 "$limit" "$@" >"$out/$name.log" 2>&1; then ended=0; else ended=$?; fi
    tail -n 40 "$out/$name.log"
    if [ "$ended" -ne 0 ]; then
        echo "== $name ended with $ended"
        failed=1
    fi
}

# Without the repository's settings, which name plugins and servers that a GPU machine lacks. Each test is
# named as it runs: what ran out of time is the last line.
gpu_tests() { # seconds, name, arguments of pytest…
    limit=$1 name=$2
    shift 2
    part "$limit" "$name" "$python" -m pytest -c /dev/null --rootdir . --noconftest -p no:cacheprovider \
        -v -rA --tb=short --durations 10 "$@"
}

case $call in
smoke)
    gpu_tests 150 smoke tests/gpu/test_smoke_on_cuda.py
    ;;
checks)
    # What compiles most comes last.
    gpu_tests 300 gpu_tests tests/gpu/test_engine_on_cuda.py tests/gpu/test_lora_on_cuda.py \
        tests/gpu/test_tiers_on_cuda.py tests/gpu/test_decoder_on_cuda.py
    gpu_tests 120 gpu_compiled tests/gpu/test_forward_on_cuda.py
    part 150 engine_check "$python" bench/engine_check.py --device cuda --out "$out"
    ;;
backends)
    part 570 backends_8b "$python" bench/engine.py --device cuda --preset h200 \
        --lora-backend seg,grouped,fused --parts tenants,phases --out "$out"
    ;;
speed)
    part 570 engine_8b "$python" bench/engine.py --device cuda --preset h200 \
        --parts tenants,phases,memory --out "$out"
    ;;
peft)
    part 400 by_hand_8b "$python" bench/engine.py --device cuda --preset h200 --parts by_hand \
        --limit-s 330 --out "$out"
    part 170 decode "$python" bench/decode.py --device cuda --out "$out"
    ;;
*)
    echo "smoke, checks, backends, speed or peft, not $call" >&2
    exit 2
    ;;
esac
exit "$failed"
