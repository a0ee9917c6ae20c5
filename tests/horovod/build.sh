#!/bin/sh
# Builds Horovod for PyTorch and gloo, from the registry, into an environment of its own: build.sh PYTHON ENVIRONMENT.
# It takes minutes, and a C++ compiler. If pip finds a torch for CUDA, it takes the compiler of CUDA, too.
set -eu
cd "$(dirname "$0")/../.."
environment=$PWD/$2
"$1" -m venv "$environment"
pip() { "$environment/bin/python" -m pip install -c constraints.txt "$@"; }

pip -e . pytest numpy
pip setuptools wheel packaging 'cmake<4'

# It is built for the torch in the environment, so neither apart from it nor taken from the cache of pip. CMake's files of
# Horovod ask for an older CMake, and for C++14, in which the headers of torch cannot be compiled.
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1
export HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
export CMAKE_POLICY_VERSION_MINIMUM=3.5 CXX="$PWD/tests/horovod/cxx" PATH="$environment/bin:$PATH"
pip --no-build-isolation --no-cache-dir --no-binary horovod horovod==0.28.1
