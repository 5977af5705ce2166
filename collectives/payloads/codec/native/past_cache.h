/* Stores past the caches: what will not be read soon need not be fetched before it is overwritten. */
#ifndef PAST_CACHE_H
#define PAST_CACHE_H

#include <stdint.h>

#ifndef __has_builtin
#define __has_builtin(name) 0
#endif

/* Elements: half a cache line, of which two stores make a whole one sooner than one store of all of it does. */
#define VECTOR 8
#define LINE 16 /* elements that memory hands over at once */

/* Elements; less than this, a core's share of its caches, stays there for whoever reads it next. */
#define LONG (1 << 18)

typedef float vector __attribute__((vector_size(4 * VECTOR)));

static inline void store_past_cache(vector values, float *out) {
#if __has_builtin(__builtin_nontemporal_store)
    __builtin_nontemporal_store(values, (vector *)out);
#else
    *(vector *)out = values;
#endif
}

/* How many elements come before the first that is aligned. */
static inline int64_t before_aligned(const float *out) {
    return (int64_t)(-(uintptr_t)out % sizeof(vector) / sizeof *out);
}

static inline vector vector_at(const float *from) {
    vector values;
    __builtin_memcpy(&values, from, sizeof values);
    return values;
}

static inline int is_aligned(const float *out) { return (uintptr_t)out % sizeof(vector) == 0; }

static inline void copy_past_cache(const float *from, int64_t numel, float *out) {
    int64_t i = 0;
    if (is_aligned(out))
        for (; i + VECTOR <= numel; i += VECTOR)
            store_past_cache(vector_at(from + i), out + i);
    for (; i < numel; i++)
        out[i] = from[i];
}

/* What is in x leaves to `out`, and a + b takes its place: one loop, which keeps memory as busy as a plain sum does.
   Reading by itself and writing by itself, a few thousand elements each, would both be slower. */
static inline void replace_by_sum(
    const float *restrict a, const float *restrict b, int64_t numel, float *restrict x, int past_cache,
    float *restrict out) {
    int64_t i = 0;
    if (past_cache && is_aligned(out))
        for (; i + VECTOR <= numel; i += VECTOR) {
            vector sum = vector_at(a + i) + vector_at(b + i);
            store_past_cache(vector_at(x + i), out + i);
            __builtin_memcpy(x + i, &sum, sizeof sum);
        }
    for (; i < numel; i++) {
        float sum = a[i] + b[i];
        out[i] = x[i];
        x[i] = sum;
    }
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
