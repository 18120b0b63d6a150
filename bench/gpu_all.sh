#!/bin/sh
# Everything that needs a GPU, in parts that fit into one short lease each, in this order:
#
#     bench/gpu_all.sh PART[,PART...] [OUT]    smoke kernels training decoding trainer_sampler checks
#                                              peft memory refresh sanitizer
#     bench/gpu_all.sh all [OUT]               all parts, 22 minutes at most
#     bench/gpu_all.sh rehearse OUT            every benchmark on a CPU, with a tiny model
#
# A lease of 15 minutes has time for two calls: smoke,kernels,training,decoding,trainer_sampler (540 s at most), which
# come first because they decide most, then checks (240 s at most).
#
# Run from the root of the repository; PYTHON picks the interpreter, which needs torch, transformers, peft,
# safetensors, pillow and numpy, and pytest (with xdist, if it is there) for the tests. Nothing of ours has to be
# installed. OUT (bench/results/gpu) gets summary.txt, the JSON files and logs.tgz, also if a part ran out of time.
# MODELS is the folder of the random models, in memory by default: 16 GB are written once.
set -u
calls=$(echo "${1:?parts, all or rehearse}" | tr , ' ')
out=${2:-bench/results/gpu}
python=${PYTHON:-python3}
models=${MODELS:-/dev/shm/cotrain-models}
logs=$out/logs
export PYTHONUNBUFFERED=1 PYTHONPATH=.:workers:scheduler TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/tmp/cotrain-triton}"
failed=

part() { # seconds, name, command…
    limit=$1 name=$2
    shift 2
    if timeout -k 10 "$limit" "$@" >"$logs/$name.log" 2>&1; then ended=0; else ended=$?; fi
    { echo "== $name ended with $ended"; tail -n 12 "$logs/$name.log" | cut -c 1-240; } | tee -a "$out/summary.txt"
    [ "$ended" -eq 0 ] || failed="$failed $name"
}

# Without the repository's settings, which name plugins and servers that a GPU machine lacks. Each result is printed
# at once, with the reason of a failure. One thread a process: several share the cores to compile kernels.
gpu_tests() { # seconds, name, arguments of pytest…
    limit=$1 name=$2
    shift 2
    several=
    "$python" -c 'import xdist' 2>/dev/null && several="-n 8"
    # shellcheck disable=SC2086
    part "$limit" "$name" env OMP_NUM_THREADS=1 "$python" -W ignore -m pytest -c /dev/null --rootdir . \
        --noconftest -p no:cacheprovider -p no:benchmark -p bench.support.instant_failures $several -v -rA \
        --tb=short --durations 10 "$@"
}

engine() { # seconds, name, options…
    limit=$1 name=$2
    shift 2
    part "$limit" "$name" "$python" -m bench engine --device cuda --models "$models" --out "$out" --limit-s "$limit" "$@"
}

smoke() {
    gpu_tests 60 smoke tests/gpu/test_smoke_on_cuda.py
}

kernels() {
    part 90 kernels "$python" -m bench kernel_rates --out "$out"
    part 60 expert_kernels "$python" -m bench kernel_rates --size 30b-a3b --rows 2048,8192 --out "$out"
}

training() {
    engine 150 training --lora-backend fused --parts tenants,phases --rounds 2
}

decoding() {
    part 90 decoding "$python" -m bench decode --device cuda --sizes '' --ceiling-adapters 16 --models "$models" --out "$out"
}

trainer_sampler() {
    part 90 trainer_sampler "$python" -m bench trainer_sampler --device cuda --models "$models" --out "$out"
}

checks() {
    gpu_tests 170 gpu_tests tests/gpu
    part 70 engine_check "$python" -m bench engine_check --device cuda --families qwen3 --out "$out"
}

peft() {
    engine 240 peft --parts by_hand
}

memory() {
    engine 120 memory --parts memory
}

refresh() {
    part 120 refresh "$python" -m bench sampler_refresh --device cuda --out "$out"
}

sanitizer() {
    for tool in memcheck racecheck; do
        part 60 "$tool" compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" -c '
import torch
from cotrain_workers.engine.model import kernel_check
from cotrain_workers.engine.decoding.lora_kernel import lora_kernel_is_right
from cotrain_workers.engine.lora.self_check import TARGETS, disagreement
print(lora_kernel_is_right(TARGETS, torch.device("cuda"), torch.bfloat16))
print(disagreement(torch.device("cuda"), torch.bfloat16))
print(kernel_check.disagreement(torch.device("cuda"), torch.bfloat16))'
    done
}

# Speed is no subject here, and one thread a process ends in time also on a busy machine.
rehearse() {
    gpu_tests 300 gpu_tests --collect-only -q tests/gpu
    part 300 engine_tiny "$python" -m bench engine --device cpu --threads 1 --preset smoke --out "$out"
    part 300 decode_tiny "$python" -m bench decode --device cpu --threads 1 --sizes tiny --batches 2 --rounds 1 \
        --ceiling-size tiny --ceiling-batch 8 --ceiling-adapters 4 --out "$out"
    part 300 trainer_sampler_tiny "$python" -m bench trainer_sampler --device cpu --threads 1 --sequences 2 --prompt 40 --tokens 16 \
        --out "$out"
    part 300 refresh_tiny "$python" -m bench sampler_refresh --device cpu --threads 1 --size tiny --tenants 3 --rounds 1 --out "$out"
    part 900 engine_check "$python" -m bench engine_check --device cpu --threads 1 --families qwen3 --out "$out"
}

parts="smoke kernels training decoding trainer_sampler checks peft memory refresh sanitizer"
[ "$calls" != all ] || calls=$parts
for each in $calls; do
    case " $parts rehearse " in
    *" $each "*) ;;
    *)
        echo "$each is no part; see the head of $0" >&2
        exit 2
        ;;
    esac
done
mkdir -p "$logs"
: >"$out/summary.txt"
for each in $calls; do
    $each
done
tar czf "$out/logs.tgz" -C "$out" logs && rm -r "$logs"
for name in $failed; do
    echo "FAILED $name (see logs.tgz)" | tee -a "$out/summary.txt"
done
[ -z "$failed" ]
