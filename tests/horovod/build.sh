#!/bin/sh
# Builds Horovod for PyTorch and gloo into a venv of its own, with join beside it: build.sh PYTHON VENV. It takes 3
# minutes and a C++ compiler; where pip finds a torch for CUDA, CUDA's compiler too.
set -eu
python=$1 venv=$2
cd "$(dirname "$0")/../.."

"$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip install -c constraints.txt "$@"; }

pip -e . pytest numpy
pip setuptools wheel packaging 'cmake<4'

# Horovod is built against the torch that is installed: so not in pip's isolated environment, and no wheel of its cache.
CXX=$PWD/tests/horovod/cxx \
PATH=$PWD/$venv/bin:$PATH \
CMAKE_POLICY_VERSION_MINIMUM=3.5 \
HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 \
HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
    pip --no-build-isolation --no-cache-dir --no-binary horovod horovod==0.28.1
