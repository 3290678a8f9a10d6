"""Lets Ctrl-C end a command while its packages are imported, without a traceback. Import this module first."""

import signal
import threading


def _listen(handler: signal.Handlers | object) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler)  # type: ignore[arg-type]


def finish() -> None:
    """Give Ctrl-C its usual meaning again. Call this after the last import."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        _listen(signal.default_int_handler)


# A handler of Python's would raise KeyboardInterrupt inside an import. The system's ends the process at once.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    _listen(signal.SIG_DFL)
