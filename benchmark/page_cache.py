"""What of a file lies in the page cache (Linux): bring it in, drop it, count it."""

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

_CHUNK = 1 << 24


def warm(files: Iterable[Path]) -> None:
    """Read every byte once."""
    buffer = bytearray(_CHUNK)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop(files: Iterable[Path]) -> None:
    """Ask the kernel to forget the pages; it keeps those that a process has mapped or that are not written yet."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def share(files: Iterable[Path]) -> float:
    """The part of the bytes that is in the page cache."""
    pages = resident = 0
    for path in files:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            view = np.frombuffer(mapped, np.uint8)
            found = np.empty(-(-len(view) // mmap.PAGESIZE), np.uint8)
            libc = ctypes.CDLL(None, use_errno=True)
            address, vector = ctypes.c_void_p(view.ctypes.data), ctypes.c_void_p(found.ctypes.data)
            if libc.mincore(address, ctypes.c_size_t(len(view)), vector):
                raise OSError(ctypes.get_errno(), "mincore failed")
            pages, resident = pages + len(found), resident + int(np.count_nonzero(found & 1))
            del view
    return resident / pages
