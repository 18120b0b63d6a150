#!/bin/sh
# Everything that wants a GPU, in calls of less than ten minutes each, in this order:
#
#     bench/gpu_all.sh smoke [OUT]      two minutes: does each fast path run, and is it right
#     bench/gpu_all.sh checks [OUT]     tests/gpu, then the promises as figures
#     bench/gpu_all.sh backends [OUT]   Qwen3-8B: the three LoRA backends at several lengths, and which is to be `auto`
#     bench/gpu_all.sh speed [OUT]      Qwen3-8B: tenants, phases, memory
#     bench/gpu_all.sh sampling [OUT]   decoding at batch 128 and 1k of context; new weights for the samplers of 32 tenants
#     bench/gpu_all.sh peft [OUT]       Qwen3-8B against PEFT
#     bench/gpu_all.sh all [OUT]        all of it, about 40 minutes; nothing after the smoke if that fails
#     bench/gpu_all.sh rehearse OUT     every script on a CPU, with a tiny model: what a GPU would be wasted on
#
# Run from the root of the repository; PYTHON picks the interpreter, which needs torch, transformers, peft,
# safetensors and numpy, and pytest for the first two. Nothing of ours has to be installed. What was measured, and
# what was printed, is in OUT (bench/results/gpu), also where a part ran out of time; the last lines name what failed.
set -u
call=${1:?smoke, checks, backends, speed, sampling, peft, all or rehearse}
out=${2:-bench/results/gpu}
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONUNBUFFERED=1 PYTHONPATH=.:workers:scheduler
failed=

part() { # seconds, name, command…
    limit=$1 name=$2
    shift 2
    echo "== $name"
    if timeout -k 10 "$limit" "$@" >"$out/$name.log" 2>&1; then ended=0; else ended=$?; fi
    tail -n 40 "$out/$name.log"
    if [ "$ended" -ne 0 ]; then
        echo "== $name ended with $ended"
        failed="$failed $name"
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

engine() { # seconds, name, arguments of the script…
    limit=$1 name=$2
    shift 2
    part "$limit" "$name" "$python" bench/engine.py --device cuda --preset h200 --out "$out" "$@"
}

smoke() {
    gpu_tests 150 smoke tests/gpu/test_smoke_on_cuda.py
}

checks() {
    gpu_tests 420 gpu_tests tests/gpu/test_engine_on_cuda.py tests/gpu/test_lora_on_cuda.py \
        tests/gpu/test_tiers_on_cuda.py tests/gpu/test_decoder_on_cuda.py tests/gpu/test_forward_on_cuda.py
    part 150 engine_check "$python" bench/engine_check.py --device cuda --out "$out"
}

backends() {
    engine 570 backends_8b --lora-backend seg,grouped,fused --parts tenants,phases
}

speed() {
    engine 570 engine_8b --parts tenants,phases,memory
}

sampling() {
    part 330 decode "$python" bench/decode.py --device cuda --out "$out"
    part 240 sampler_refresh "$python" bench/sampler_refresh.py --device cuda --out "$out"
}

peft() {
    engine 570 by_hand_8b --parts by_hand
}

rehearse() {
    gpu_tests 300 gpu_tests --collect-only tests/gpu
    part 300 engine_tiny "$python" bench/engine.py --device cpu --preset smoke --lora-backend seg,grouped --out "$out"
    part 300 decode_tiny "$python" bench/decode.py --device cpu --sizes tiny --batches 2 --rounds 1 \
        --ceiling-size tiny --ceiling-batch 8 --out "$out"
    part 120 refresh_tiny "$python" bench/sampler_refresh.py --device cpu --size tiny --tenants 3 --rounds 1 --out "$out"
    part 300 engine_check "$python" bench/engine_check.py --device cpu --families qwen3 --out "$out"
}

case $call in
smoke | checks | backends | speed | sampling | peft | rehearse)
    $call
    ;;
all)
    smoke
    if [ -z "$failed" ]; then
        checks
        backends
        speed
        sampling
        peft
    fi
    ;;
*)
    echo "smoke, checks, backends, speed, sampling, peft, all or rehearse, not $call" >&2
    exit 2
    ;;
esac
for name in $failed; do
    echo "FAILED $name (see $out/$name.log)"
    grep '^\(FAILED\|ERROR\) ' "$out/$name.log"
done
[ -z "$failed" ]
