"""Makes calls that must not wait, for example for a writer if a file is replaced by a FIFO."""

import threading


def promptly(call):
    """Makes a call within ten seconds; returns its result, or the text of its error."""
    results = []

    def make():
        try:
            results.append(call())
        except Exception as error:
            results.append(str(error))

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(10)
    assert results, "it waits"
    return results[0]
