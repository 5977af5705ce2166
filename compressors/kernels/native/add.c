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

struct accelerated {
    vector velocity, sum;
};

/* In the order of the plain sums: the velocity is rounded before the residual comes to it. */
static inline struct accelerated accelerated(
    vector g, vector velocity, vector residual, float momentum, int64_t nesterov) {
    vector now = nesterov ? momentum * (g + velocity) : g + momentum * velocity;
    vector sum = now + residual;
    return (struct accelerated){now, nesterov ? g + sum : sum};
}

static inline void accelerate_one(
    const float *g, const float *velocity, const float *residual, float momentum, int64_t nesterov, float *now,
    float *sum) {
    struct accelerated next = accelerated((vector){*g}, (vector){*velocity}, (vector){*residual}, momentum, nesterov);
    *now = next.velocity[0];
    *sum = next.sum[0];
}

/* now = gradient + momentum * velocity, sum = now + residual; with nesterov now = momentum * (gradient + velocity), and
   sum has the gradient once more. */
void accelerate(
    const float *gradient, const float *velocity, const float *residual, float momentum, int64_t nesterov,
    int64_t numel, float *now, float *sum) {
    int64_t i = 0;
    if (numel >= LONG && (uintptr_t)now % sizeof(vector) == (uintptr_t)sum % sizeof(vector)) {
        for (; !is_aligned(now + i); i++)
            accelerate_one(gradient + i, velocity + i, residual + i, momentum, nesterov, now + i, sum + i);
        for (; i + VECTOR <= numel; i += VECTOR) {
            struct accelerated next = accelerated(
                vector_at(gradient + i), vector_at(velocity + i), vector_at(residual + i), momentum, nesterov);
            store_past_cache(next.velocity, now + i);
            store_past_cache(next.sum, sum + i);
        }
        finish_past_cache();
    }
    for (; i < numel; i++)
        accelerate_one(gradient + i, velocity + i, residual + i, momentum, nesterov, now + i, sum + i);
}

/* `accelerate` of gradients that do not lie end to end, as all else does. */
void accelerate_parts(
    const float *const *gradients, const int64_t *borders, int64_t num_parts, const float *velocity,
    const float *residual, float momentum, int64_t nesterov, float *now, float *sum) {
    for (int64_t part = 0; part < num_parts; part++) {
        int64_t start = borders[part], numel = borders[part + 1] - start;
        accelerate(gradients[part], velocity + start, residual + start, momentum, nesterov, numel, now + start,
                   sum + start);
    }
}
