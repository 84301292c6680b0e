#!/usr/bin/env bash
# supervised.sh COMMAND...: runs a command as two ranks under a supervisor, in the environment of launch/env.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. launch/lib.sh
. launch/env.sh
supervise mpirun --mca pml ob1 --mca btl ^openib -bind-to none -np 2 -H localhost:2 "$@"
