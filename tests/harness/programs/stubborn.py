"""Never ends by itself: ignores SIGTERM, as does its child in a session of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"
child = subprocess.Popen(
    [sys.executable, "-S", "-c", code], start_new_session=True, stdout=subprocess.PIPE
)
assert child.stdout
child.stdout.readline()
pids = Path(sys.argv[1])
pids.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
pids.with_suffix(".new").rename(pids)
time.sleep(600)
