/* Stores past the caches: what will not be read soon need not be fetched before it is overwritten. */
#ifndef PAST_CACHE_H
#define PAST_CACHE_H

#include <stdint.h>

#ifndef __has_builtin
#define __has_builtin(name) 0
#endif

#define VECTOR 16

/* Elements; less than this stays in a cache for whoever reads it next. */
#define LONG (1 << 22)

typedef float vector __attribute__((vector_size(4 * VECTOR)));

static inline void store_past_cache(vector values, float *out) {
#if __has_builtin(__builtin_nontemporal_store)
    __builtin_nontemporal_store(values, (vector *)out);
#else
    *(vector *)out = values;
#endif
}

static inline int is_aligned(const float *out) { return (uintptr_t)out % sizeof(vector) == 0; }

static inline void copy_past_cache(const float *from, int64_t numel, float *out) {
    int64_t i = 0;
    if (is_aligned(out))
        for (; i + VECTOR <= numel; i += VECTOR) {
            vector values;
            __builtin_memcpy(&values, from + i, sizeof values);
            store_past_cache(values, out + i);
        }
    for (; i < numel; i++)
        out[i] = from[i];
}

/* A stretch of `numel` elements in all: past the caches where those are many. */
static inline void copy_part(const float *from, int64_t width, int64_t numel, float *out) {
    if (numel >= LONG)
        copy_past_cache(from, width, out);
    else
        for (int64_t i = 0; i < width; i++)
            out[i] = from[i];
}

/* Other threads see such stores in order only behind a fence. */
static inline void finish_past_cache(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

#endif
