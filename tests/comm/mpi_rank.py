"""A rank of Open MPI without Horovod or TensorFlow: FOLDER. Notes what it will leave, starts MPI, waits."""

import ctypes
import os
import pathlib
import sys
import time

from hybrid_imagenet.comm import leftovers
from hybrid_imagenet.comm.environment import openmpi_prefix

leftovers.hold()
prefix = openmpi_prefix()
mpi = ctypes.CDLL(f"{prefix}/lib/libmpi.so.40" if prefix else "libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
mpi.MPI_Init(None, None)
session = os.environ["OMPI_MCA_orte_jobfam_session_dir"]  # noqa: SIM112 - Open MPI's name
(pathlib.Path(sys.argv[1]) / str(os.getpid())).write_text(session)
time.sleep(300)
