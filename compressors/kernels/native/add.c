/* out = a + b past the caches: what will not be read soon need not be fetched before it is overwritten. */
#include <stdint.h>

#ifndef __has_builtin
#define __has_builtin(name) 0
#endif

#define LANES 16

typedef float lanes __attribute__((vector_size(4 * LANES)));

static inline void store_past_cache(lanes values, lanes *out) {
#if __has_builtin(__builtin_nontemporal_store)
    __builtin_nontemporal_store(values, out);
#else
    *out = values;
#endif
}

void add_past_cache(const float *a, const float *b, int64_t numel, float *out) {
    int64_t i = 0;
    for (; i < numel && (uintptr_t)(out + i) % sizeof(lanes); i++)
        out[i] = a[i] + b[i];
    for (; i + LANES <= numel; i += LANES) {
        lanes left, right;
        __builtin_memcpy(&left, a + i, sizeof left);
        __builtin_memcpy(&right, b + i, sizeof right);
        store_past_cache(left + right, (lanes *)(out + i));
    }
    for (; i < numel; i++)
        out[i] = a[i] + b[i];
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* such stores are seen in order by other threads only behind a fence */
}
