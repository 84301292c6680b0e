"""The supervisor with shorter times: SCRIPT SECONDS [local]. The script finds the job's word as
$WORD.
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
for _ in range(8):  # as libraries have: NumPy's one for each core
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
lossy_stream.install(ignore_write_errors=True)
job = supervisor.Supervisor(
    ["sh", "-c", "WORD=$HYBRID_IMAGENET_JOB;" + script], is_local="local" in more
)
sys.exit(job.run())
