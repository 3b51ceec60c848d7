"""A scheduler that lives and says nothing."""

import signal

signal.pause()
