"""Ends in the way its first argument says, after saying so without a newline at the end."""

import atexit
import os
import signal
import sys
import threading
import time


def in_a_while():
    time.sleep(0.1)
    print("the thread ended")


def fail():
    raise ValueError("no luck")


print("hello", end="")
atexit.register(print, "goodbye", end="")
how = sys.argv[1]
if how == "thread":
    threading.Thread(target=in_a_while).start()
elif how == "raise":
    fail()
elif how == "text":
    sys.exit("a last word")
elif how == "signal":
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGABRT)
elif how.isdigit():
    sys.exit(int(how))
