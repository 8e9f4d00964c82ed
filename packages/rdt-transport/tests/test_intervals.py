import time

from rdt_transport.intervals import Interval, Intervals


def test_intervals_end_when_they_are_added_and_keep_their_order() -> None:
    kept, start = Intervals(), time.perf_counter()
    kept.add("read", 3, start)
    kept.add("gather", -1, start)
    end = time.perf_counter()

    rows = list(kept)
    assert len(kept) == 2
    assert [(row.stage, row.chunk, row.start) for row in rows] == [
        ("read", 3, start),
        ("gather", -1, start),
    ]
    assert start <= rows[0].end <= rows[1].end <= end
    assert isinstance(rows[0], Interval)
