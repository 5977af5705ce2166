/* Sums of what a rank keeps from step to step, in one pass. Products are rounded before they are added. */
#include "../../../collectives/payloads/codec/native/past_cache.h"

/* out = a + factor * b; out may be b. */
void add_scaled(const float *a, float factor, const float *b, int64_t numel, float *out) {
    int64_t i = 0;
    if (numel >= LONG) {
        for (; !is_aligned(out + i); i++)
            out[i] = a[i] + factor * b[i];
        for (; i + VECTOR <= numel; i += VECTOR) {
            vector left, right;
            __builtin_memcpy(&left, a + i, sizeof left);
            __builtin_memcpy(&right, b + i, sizeof right);
            store_past_cache(left + factor * right, out + i);
        }
        finish_past_cache();
    }
    for (; i < numel; i++)
        out[i] = a[i] + factor * b[i];
}
