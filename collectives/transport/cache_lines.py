"""Cache flushes and memory fences, for memory in which the ranks' caches do not see each other's stores.

An example is memory that several hosts map through CXL, unless the device supports back-invalidation. The instructions
are compiled once with the system's C compiler, and the library is stored in the user's cache folder.

Source: Intel 64 manual, CLFLUSHOPT and SFENCE; Arm ARM, DC CIVAC and DSB.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from collectives.options import OptionError

SOURCE = r"""
#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
__attribute__((target("clflushopt"))) static void flush_fast(const char *p, const char *end) {
    for (; p < end; p += 64) _mm_clflushopt((void *)p);
}
static void flush(const char *p, const char *end) {
    unsigned a, b = 0, c, d;
    __get_cpuid_count(7, 0, &a, &b, &c, &d);
    if (b & (1u << 23)) flush_fast(p, end);
    else for (; p < end; p += 64) _mm_clflush(p);
    _mm_mfence();
}
#elif defined(__aarch64__)
static void flush(const char *p, const char *end) {
    for (; p < end; p += 64) __asm__ volatile("dc civac, %0" ::"r"(p) : "memory");
    __asm__ volatile("dsb sy" ::: "memory");
}
#else
#error "no cache flush is known for this processor"
#endif
void fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void flush_lines(const void *start, size_t nbytes) {
    uintptr_t p = (uintptr_t)start;
    fence();
    flush((const char *)(p & ~(uintptr_t)63), (const char *)(p + nbytes));
}
"""


class CacheLines:
    """The functions of the compiled library.

    Attributes:
        flush: (address, nbytes) -> None: write cache lines back and drop them, so that the next load reads memory.
        fence: () -> None: no load or store is reordered across this call.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.flush = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)(("flush_lines", library))
        self.fence = ctypes.CFUNCTYPE(None)(("fence", library))


def stores_are_ordered() -> bool:
    """Return True if other processors see the stores of this one in program order without fences."""
    return platform.machine() in ("x86_64", "AMD64")


@functools.cache
def cache_lines() -> CacheLines:
    """Return the library's functions; compile it if it is not in the user's cache folder.

    Raises:
        OptionError: there is no C compiler, or it fails.
    """
    digest = hashlib.sha256((SOURCE + platform.machine()).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradwire"
    library = folder / f"cachelines-{digest}.so"
    if not library.exists():
        _compile(library)
    return CacheLines(ctypes.CDLL(str(library)))


def _compile(library: Path) -> None:
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        raise OptionError(
            "pool: flushing cache lines needs a C compiler, and no cc, gcc or clang was found; install one"
        )
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / "cachelines.so"
        command = [compiler, "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(built)]
        done = subprocess.run(command, input=SOURCE, text=True, capture_output=True, check=False)
        if done.returncode:
            first = (done.stderr.strip() or "no message").splitlines()[0]
            raise OptionError(f"pool: the cache-flush helper does not compile on this machine: {first}")
        built.replace(library)  # atomically, because other ranks may compile it at the same time
