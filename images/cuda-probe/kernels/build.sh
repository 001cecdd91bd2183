#!/bin/sh
# Builds libgdn.so for sm_70, with compute_70 PTX so that the driver of a newer card can compile it.
#   build.sh OUTPUT [FAULT] [CONTRACT]
# PTX=0 leaves the PTX out: the code then runs on capability 7.x only, and the smoke test must say so.
# CXX names the host compiler where nvcc does not find its own (Debian's toolkit brings g++-11).
# FAULT is a name from buildkit/gdn/faults.py (key-band-zeroed, ...) or "none"; CONTRACT is "log" or "decay".
set -eu
output=$1
fault=${2:-none}
contract=${3:-log}
here=$(dirname "$0")

set -- ${CXX:+-ccbin "$CXX"} -std=c++17 -O2 -shared -Xcompiler -fPIC -cudart static \
    -gencode arch=compute_70,code=sm_70
if [ "${PTX:-1}" = 1 ]; then
    set -- "$@" -gencode arch=compute_70,code=compute_70
fi
if [ "$fault" != none ]; then
    define=GDN_FAULT_$(printf %s "$fault" | tr 'a-z-' 'A-Z_')
    grep -q "$define\b" "$here/gdn.cu" || { echo "build.sh: no fault $fault lives in these kernels" >&2; exit 2; }
    set -- "$@" "-D$define"
fi
case $contract in
log) ;;
decay) set -- "$@" -DGDN_CONTRACT_DECAY ;;
*) echo "build.sh: contract $contract is not log or decay" >&2; exit 2 ;;
esac
exec nvcc "$@" -o "$output" "$here/gdn.cu"
