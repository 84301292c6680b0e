#!/usr/bin/env bash
# supervised.sh COMMAND...: runs supervise on a program of two ranks, with everything that local.sh does around it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. launch/lib.sh
. launch/env.sh
supervise mpirun --mca pml ob1 --mca btl ^openib -bind-to none -np 2 -H localhost:2 "$@"
