from __future__ import annotations

import threading

import pytest

from dflop.errors import StoreError
from dflop.jobs.spooling import SpoolThread
from dflop.records import Correction
from dflop.store.spool import SpoolWriter, read_spool


def correction(step):
    return Correction("run", step, "llm", "table", 1.0, 0.1, 8, 1000.0)


def test_everything_handed_over_is_on_disk_after_close(tmp_path):
    spool = SpoolThread(SpoolWriter(tmp_path, "run", "train-r0-a1", flush_rows=4))
    for step in range(10):
        spool.put(correction(step))
    spool.close()
    assert [c.effective_step for c in read_spool(tmp_path, Correction)] == list(range(10))


def test_what_was_handed_over_is_on_disk_after_a_flush(tmp_path):
    spool = SpoolThread(SpoolWriter(tmp_path, "run", "train-r0-a1"))
    for end in (3, 6):
        for step in range(end - 3, end):
            spool.put(correction(step))
        spool.flush()
        assert [c.effective_step for c in read_spool(tmp_path, Correction)] == list(range(end))
    spool.close()


class FailingWriter:
    """Fails while `broken`; notes which thread writes; flushes every `flush_rows`."""

    def __init__(self, flush_rows=1):
        self.broken, self.buffer, self.written, self.threads = True, [], [], set()
        self.appended, self.flush_rows = threading.Semaphore(0), flush_rows

    @property
    def num_buffered(self):
        return len(self.buffer)

    def append(self, record):
        self.buffer.append(record)
        try:
            if len(self.buffer) % self.flush_rows == 0:
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


def test_a_full_disk_is_reported_once_and_rows_are_kept(capfd):
    writer = FailingWriter()
    spool = SpoolThread(writer)
    put_and_wait(spool, writer, [1, 2, 3])
    writer.broken = False
    put_and_wait(spool, writer, [4])
    spool.close()
    assert writer.written == [1, 2, 3, 4]
    said = capfd.readouterr().err
    assert (said.count("disk is full"), said.count("written again")) == (1, 1)
    assert writer.threads.isdisjoint({threading.current_thread()}), "the training thread waited for the disk"


def test_a_row_that_only_goes_into_the_buffer_does_not_mean_that_the_disk_has_room(capfd):
    writer = FailingWriter(flush_rows=2)
    spool = SpoolThread(writer)
    put_and_wait(spool, writer, range(6))
    spool.flush()
    said = capfd.readouterr().err
    assert (said.count("disk is full"), said.count("written again")) == (1, 0)
    writer.broken = False
    spool.close()
    assert writer.written == list(range(6))
    said = capfd.readouterr().err
    assert (said.count("disk is full"), said.count("written again")) == (0, 1)


def test_rows_that_are_lost_in_the_end_are_reported_again(capfd):
    writer = FailingWriter()
    spool = SpoolThread(writer)
    put_and_wait(spool, writer, [1, 2])
    capfd.readouterr()
    spool.close()
    assert "disk is full" in capfd.readouterr().err


@pytest.mark.parametrize("num_records", [0, 1])
def test_close_ends_the_thread(tmp_path, num_records):
    before = threading.active_count()
    spool = SpoolThread(SpoolWriter(tmp_path, "run", "train-r0-a1"))
    for step in range(num_records):
        spool.put(correction(step))
    spool.close()
    assert threading.active_count() == before
