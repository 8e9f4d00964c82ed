#!/usr/bin/env bash
# The GPU benchmark where there is no hatch: any python3 with torch, Triton, Ray, NIXL and vLLM.
# usage: bash bench/gpu.sh [options of `python -m bench.gpu`]
set -euo pipefail
cd "$(dirname "$0")/.."
sources=$(printf '%s:' "$PWD"/packages/*/src)
export PYTHONPATH="$PWD:$sources${PYTHONPATH:-}"
export UCX_NET_DEVICES="${UCX_NET_DEVICES:-lo}"
# vLLM's sharded_rdt reads over TCP without it; ours sets it itself.
export UCX_CUDA_IPC_ENABLE_GET_ZCOPY="${UCX_CUDA_IPC_ENABLE_GET_ZCOPY:-y}"
exec python3 -m bench.gpu "$@"
