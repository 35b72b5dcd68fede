"""Signals of processes that tests start."""
import signal


def interruptible() -> None:
    """As `preexec_fn`: SIGINT reaches the child even where this process ignores it, as shells' background jobs do."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
