"""Calls that must not wait, as one does that opens a FIFO in the place of a file."""

import threading


def promptly(call):
    """Makes a call within ten seconds; returns what it returns, or the text of its error."""
    found = []

    def make():
        try:
            found.append(call())
        except Exception as error:
            found.append(str(error))

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(10)
    assert found, "it waits"
    return found[0]
