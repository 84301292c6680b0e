#!/usr/bin/env bash
# launch/test.sh [ARGUMENT ...]
#
# Sets everything up (launch/setup.sh), then runs the tests. Without arguments two processes run all tests; arguments are
# passed to pytest:
#
#   launch/test.sh tests/launch -k hosts
set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case ${1:-} in -h | --help) help_of "${BASH_SOURCE[0]}" && exit 0 ;; esac
"$launch_dir/setup.sh" --tests
# shellcheck source=launch/env.sh
. "$launch_dir/env.sh"
cd "$root_dir"
# After a worker has crashed, pytest-xdist would wait forever for its last tests.
(($#)) || set -- --numprocesses=2 --dist=loadgroup --no-loadscope-reorder --max-worker-restart=0
exec "$venv_dir/bin/python" -m pytest "$@"
