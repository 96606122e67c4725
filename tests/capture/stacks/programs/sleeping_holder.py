"""A thread sleeps in native code that does not release the interpreter lock, while the main thread needs the lock."""

import ctypes
import threading

native = ctypes.PyDLL(None)
native.sleep.argtypes = [ctypes.c_uint]


def poll_device():
    print("there", flush=True)
    native.sleep(100)


threading.Thread(target=poll_device, daemon=True).start()
while True:
    sum(range(1000))
