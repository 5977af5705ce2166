/* Non-temporal stores bypass the caches, so that memory is not read before it is overwritten. */
#ifndef NONTEMPORAL_H
#define NONTEMPORAL_H

#include <stdint.h>

#ifndef __has_builtin
#define __has_builtin(name) 0
#endif

/* floats per vector, 32 bytes: two such stores fill a cache line faster than one 64-byte store */
#define VECTOR_NUMEL 8
#define CACHE_LINE 16 /* floats per cache line */

/* Results with fewer elements are stored normally: they fit into a core's caches, where the next reader finds them. */
#define NONTEMPORAL_MIN_NUMEL (1 << 18)

typedef float vector __attribute__((vector_size(4 * VECTOR_NUMEL)));

static inline void store_nontemporal(vector values, float *out) {
#if __has_builtin(__builtin_nontemporal_store)
    __builtin_nontemporal_store(values, (vector *)out);
#else
    *(vector *)out = values;
#endif
}

/* Returns the number of elements before the first aligned address. */
static inline int64_t numel_before_aligned(const float *out) {
    return (int64_t)(-(uintptr_t)out % sizeof(vector) / sizeof *out);
}

static inline vector load_vector(const float *from) {
    vector values;
    __builtin_memcpy(&values, from, sizeof values);
    return values;
}

static inline int is_aligned(const float *out) { return (uintptr_t)out % sizeof(vector) == 0; }

static inline void copy_nontemporal(const float *from, int64_t numel, float *out) {
    int64_t i = 0;
    if (is_aligned(out))
        for (; i + VECTOR_NUMEL <= numel; i += VECTOR_NUMEL)
            store_nontemporal(load_vector(from + i), out + i);
    for (; i < numel; i++)
        out[i] = from[i];
}

/* Writes x to `out`, then replaces x by a + b. One loop does both, so that reads and writes overlap as in a plain sum;
   separate loops over a few thousand elements each are slower. */
static inline void flush_and_add(
    const float *restrict a, const float *restrict b, int64_t numel, float *restrict x, int nontemporal,
    float *restrict out) {
    int64_t i = 0;
    if (nontemporal && is_aligned(out))
        for (; i + VECTOR_NUMEL <= numel; i += VECTOR_NUMEL) {
            vector sum = load_vector(a + i) + load_vector(b + i);
            store_nontemporal(load_vector(x + i), out + i);
            __builtin_memcpy(x + i, &sum, sizeof sum);
        }
    for (; i < numel; i++) {
        float sum = a[i] + b[i];
        out[i] = x[i];
        x[i] = sum;
    }
}

/* Copies `width` elements of a result of `numel` elements, with non-temporal stores if that is many. */
static inline void copy_chunk(const float *from, int64_t width, int64_t numel, float *out) {
    if (numel >= NONTEMPORAL_MIN_NUMEL)
        copy_nontemporal(from, width, out);
    else
        for (int64_t i = 0; i < width; i++)
            out[i] = from[i];
}

/* Non-temporal stores are weakly ordered: without a fence, another thread may not see them. */
static inline void fence_nontemporal_stores(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

#endif
