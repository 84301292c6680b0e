"""Profiles as TensorFlow writes them, made by tests."""

MILLISECOND = 1_000_000_000  # picoseconds


class Plane:
    """Writes events as TensorFlow's profiler does."""

    def __init__(self, space, name):
        self.plane = space.planes.add(name=name)
        self.lines = {}

    def add(self, line, event_name, start, end, **facts):
        if line not in self.lines:
            self.lines[line] = self.plane.lines.add(name=line, timestamp_ns=5_000_000)
        number = len(self.plane.event_metadata) + 1
        self.plane.event_metadata[number].name = event_name
        event = self.lines[line].events.add(
            metadata_id=number, offset_ps=int(start * MILLISECOND), duration_ps=int((end - start) * MILLISECOND)
        )
        for key, value in facts.items():
            known = len(self.plane.stat_metadata) + 1
            self.plane.stat_metadata[known].name = key
            stat = event.stats.add(metadata_id=known)
            if isinstance(value, int):
                stat.int64_value = value
            else:
                stat.str_value = value

    def asynchronous(self, name, kind, start, end, step=1):
        facts = {"name": name, "kernel_type": kind, "step_id": step}
        self.add("pool", "ExecutorState::ProcessAsync::Start", start, start + 0.1, **facts)
        self.add("background", "ExecutorState::ProcessAsync::Done", end, end + 3, **facts)
