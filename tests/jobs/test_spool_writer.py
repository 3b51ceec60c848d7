from __future__ import annotations

import threading

from dflop.errors import StoreError
from dflop.jobs.spool_writer import SpoolThread
from dflop.records import Correction
from dflop.store.spool import SpoolWriter
from tests.store.spooled import read_spool


def correction(step):
    return Correction("run", step, "llm", "table", 1.0, 0.1, 8, 1000.0)


def test_what_was_handed_over_is_on_disk_after_a_flush_and_a_close(tmp_path):
    before = threading.active_count()
    spool = SpoolThread(SpoolWriter(tmp_path, "run", "train-r0-a1", flush_rows=4))
    for end in (3, 6):
        for step in range(end - 3, end):
            spool.put(correction(step))
        spool.flush()
        assert [c.effective_step for c in read_spool(tmp_path, Correction)] == list(range(end))
    spool.put(correction(6))
    spool.close()
    assert [c.effective_step for c in read_spool(tmp_path, Correction)] == list(range(7))
    SpoolThread(SpoolWriter(tmp_path, "run", "train-r1-a1")).close()
    assert threading.active_count() == before, "close ends the thread"


class FailingWriter:
    """Fails while `broken`; notes which thread writes."""

    def __init__(self):
        self.broken, self.buffer, self.written, self.threads = True, [], [], set()
        self.appended = threading.Semaphore(0)

    def append(self, record):
        self.buffer.append(record)
        try:
            self.flush()
        finally:
            self.appended.release()

    def flush(self):
        self.threads.add(threading.current_thread())
        if self.broken:
            raise StoreError("disk is full")
        self.written += self.buffer
        self.buffer = []


def put_and_wait(spool, writer, records):
    for record in records:
        spool.put(record)
    for _ in records:
        assert writer.appended.acquire(timeout=20)


def test_a_full_disk_is_reported_once_and_rows_are_kept_or_reported_again_in_the_end(capfd):
    writer = FailingWriter()
    spool = SpoolThread(writer)
    put_and_wait(spool, writer, [1, 2, 3])
    writer.broken = False
    put_and_wait(spool, writer, [4])
    spool.flush()
    assert writer.written == [1, 2, 3, 4]
    said = capfd.readouterr().err
    assert said.count("disk is full") == 1
    assert said.count("written again") == 1
    writer.broken = True
    put_and_wait(spool, writer, [5, 6])
    assert "disk is full" in capfd.readouterr().err
    spool.close()
    assert "disk is full" in capfd.readouterr().err
    assert writer.threads.isdisjoint({threading.current_thread()}), "the training thread waited for the disk"
