"""The supervisor with shorter times: SCRIPT SECONDS [local]. The script finds the job's word as
$WORD.
"""

import sys
import threading
import time

from hybrid_imagenet.resilience import lasting_output, supervisor

script, orphans, *more = sys.argv[1:]
supervisor._GRACE, supervisor._KILL_AFTER, supervisor._ORPHAN_GRACE = 0.5, 0.5, float(orphans)
supervisor._LEFT_PATIENCE = 0.5
for _ in range(8):  # as libraries have: NumPy's one for each core
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
lasting_output.install(lossy=True)
job = supervisor.Supervisor(
    ["sh", "-c", "WORD=$HYBRID_IMAGENET_JOB;" + script], is_local="local" in more
)
sys.exit(job.run())
