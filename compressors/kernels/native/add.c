/* out = a + b past the caches: what will not be read soon need not be fetched before it is overwritten. */
#include <stdint.h>

#define LANES 16

#ifdef __clang__
#define STORE_PAST_CACHE(values, out) __builtin_nontemporal_store(values, out)
#else
#define STORE_PAST_CACHE(values, out) (*(out) = (values))
#endif

typedef float lanes __attribute__((vector_size(4 * LANES)));

void add_past_cache(const float *a, const float *b, int64_t numel, float *out) {
    int64_t i = 0;
    for (; i < numel && (uintptr_t)(out + i) % sizeof(lanes); i++)
        out[i] = a[i] + b[i];
    for (; i + LANES <= numel; i += LANES) {
        lanes left, right;
        __builtin_memcpy(&left, a + i, sizeof left);
        __builtin_memcpy(&right, b + i, sizeof right);
        STORE_PAST_CACHE(left + right, (lanes *)(out + i));
    }
    for (; i < numel; i++)
        out[i] = a[i] + b[i];
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* without it other threads may see such stores late */
}
