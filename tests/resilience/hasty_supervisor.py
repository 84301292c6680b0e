"""Runs the supervisor with short time limits: SCRIPT SECONDS [local].

The script has the job's word in $WORD.
"""

import sys
import threading
import time

from hybrid_imagenet.resilience import lossy_stream, supervisor

script, orphans, *more = sys.argv[1:]
supervisor._LAUNCHER_GRACE_SECONDS = 0.5
supervisor._TERMINATE_TO_KILL_SECONDS = 0.5
supervisor._ORPHAN_GRACE_SECONDS = float(orphans)
supervisor._EARLY_RANK_PATIENCE_SECONDS = 0.5
# Libraries have threads too; NumPy starts one for each core.
for _ in range(8):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
lossy_stream.install(ignore_write_errors=True)
job = supervisor.Supervisor(
    ["sh", "-c", "WORD=$HYBRID_IMAGENET_JOB;" + script], is_local="local" in more
)
sys.exit(job.run())
