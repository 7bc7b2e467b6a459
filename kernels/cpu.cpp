// What decoding and training do between their matmuls, for float and bfloat16 on a CPU. See cpu.py for the reference.
//
// All sums run in fp32. Vectors are 16 floats wide whatever the machine; the compiler splits them where it has to.
// Sizes (head size, hidden size, MLP width) are multiples of 16, checked by the caller.

#include <vector>

#ifndef SIZES  // head sizes in vectors; each costs a second or more of compiling
#define SIZES CASE(1) CASE(2) CASE(4) CASE(5) CASE(6) CASE(8) CASE(16)
#endif

#include "lanes.h"
#include "logits.h"
#include "stream.h"

namespace {

// hidden += delta (when given); out = hidden / rms(hidden) * weight. One row.
template <typename T>
void add_norm_row(T* hidden, const T* delta, const float* weight, T* out, int64_t dim, float eps) {
    vf squares = {};
    for (int64_t i = 0; i < dim; i += W) {
        vf x = load(hidden + i);
        if (delta != nullptr) {
            x = rounded<T>(x + load(delta + i));
            store(hidden + i, x);
        }
        squares += x * x;
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / dim + eps);
    for (int64_t i = 0; i < dim; i += W) store(out + i, load(hidden + i) * scale * load(weight + i));
}

// RMS norm (when weight is given) and rotary embedding of one head, into fp32. cos and sin hold `half` values: the first
// 2 * half of the D numbers are rotated.
template <typename T>
void prepare_head(const T* x, const float* weight, const T* cos, const T* sin, int64_t half, float eps, int64_t D,
                  float* out) {
    vf squares = {};
    for (int64_t i = 0; i < D; i += W) {
        vf v = load(x + i);
        squares += v * v;
        store(out + i, v);
    }
    if (weight != nullptr) {
        const float scale = 1.0f / std::sqrt(sum(squares) / D + eps);
        for (int64_t i = 0; i < D; i += W) store(out + i, load(out + i) * scale * load(weight + i));
    }
    for (int64_t i = 0; i < half; ++i) {
        float c, s;
        if constexpr (sizeof(T) == 4) {
            c = cos[i];
            s = sin[i];
        } else {
            uint32_t cb = uint32_t(cos[i].bits) << 16, sb = uint32_t(sin[i].bits) << 16;
            std::memcpy(&c, &cb, 4);
            std::memcpy(&s, &sb, 4);
        }
        const float a = out[i], b = out[i + half];
        out[i] = a * c - b * s;
        out[i + half] = b * c + a * s;
    }
}

// H query heads against one key/value head: scores, softmax, weighted sum. q is scaled already; scores has room for
// H rows of `stride` floats. sinks [H] (may be null) are further scores in the softmax, whose values are zero.
template <typename T, int ND, int H>
void attend_heads(const float* q, const T* keys, const T* values, int64_t count, float* scores, int64_t stride,
                  const float* sinks, T* out) {
    constexpr int D = ND * W;
    float top[H];
    for (int h = 0; h < H; ++h) top[h] = sinks ? sinks[h] : -std::numeric_limits<float>::infinity();
    for (int64_t t = 0; t < count; ++t) {
        vf k[ND];
        for (int d = 0; d < ND; ++d) k[d] = load(keys + t * D + d * W);
        for (int h = 0; h < H; ++h) {
            vf acc = load(q + h * D) * k[0];
            for (int d = 1; d < ND; ++d) acc += load(q + h * D + d * W) * k[d];
            const float s = sum(acc);
            scores[h * stride + t] = s;
            top[h] = s > top[h] ? s : top[h];
        }
    }
    float inverse[H];
    for (int h = 0; h < H; ++h) {
        float* row = scores + h * stride;
        for (int64_t t = count; t % W; ++t) row[t] = -std::numeric_limits<float>::infinity();
        vf total = {};
        for (int64_t t = 0; t < count; t += W) {
            vf e = vexp(load(row + t) - top[h]);
            store(row + t, e);
            total += e;
        }
        inverse[h] = 1.0f / (sum(total) + (sinks ? std::exp(sinks[h] - top[h]) : 0.0f));
    }
    vf acc[H][ND] = {};
    for (int64_t t = 0; t < count; ++t) {
        vf v[ND];
        for (int d = 0; d < ND; ++d) v[d] = load(values + t * D + d * W);
        for (int h = 0; h < H; ++h)
            for (int d = 0; d < ND; ++d) acc[h][d] += scores[h * stride + t] * v[d];
    }
    for (int h = 0; h < H; ++h)
        for (int d = 0; d < ND; ++d) store(out + h * D + d * W, acc[h][d] * inverse[h]);
}

template <typename T, int ND>
void attend_group(const float* q, int64_t heads, const T* keys, const T* values, int64_t count, float* scores,
                  int64_t stride, const float* sinks, T* out) {
    constexpr int D = ND * W;
    const auto sink = [&](int64_t h) { return sinks ? sinks + h : nullptr; };
    int64_t h = 0;
    for (; h + 4 <= heads; h += 4)
        attend_heads<T, ND, 4>(q + h * D, keys, values, count, scores, stride, sink(h), out + h * D);
    for (; h + 2 <= heads; h += 2)
        attend_heads<T, ND, 2>(q + h * D, keys, values, count, scores, stride, sink(h), out + h * D);
    for (; h < heads; ++h)
        attend_heads<T, ND, 1>(q + h * D, keys, values, count, scores, stride, sink(h), out + h * D);
}

struct Attention {
    int64_t rows, groups, heads, length, window, half, stride_qkv;
    float scale, eps;
    const float* sinks;  // [groups * heads], or null
};

template <typename T, int ND>
void attend_rows(const T* qkv, const float* norm, const T* cos, const T* sin, T* keys, T* values, const int64_t* positions,
                 T* out, const Attention& a) {
    constexpr int D = ND * W;
#pragma omp parallel
    {
        const int64_t stride = (a.length + W) / W * W;
        std::vector<float> q(a.heads * D), k(D), scores(4 * stride);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < a.rows * a.groups; ++task) {
            const int64_t row = task / a.groups, position = positions[row];
            const T* in = qkv + row * a.stride_qkv + task % a.groups * (a.heads + 2) * D;
            const T* c = cos + row * a.half;
            const T* s = sin + row * a.half;
            for (int64_t h = 0; h < a.heads; ++h) {
                prepare_head(in + h * D, norm, c, s, a.half, a.eps, D, q.data() + h * D);
                for (int d = 0; d < D; d += W) store(&q[h * D + d], load(&q[h * D + d]) * a.scale);
            }
            prepare_head(in + a.heads * D, norm ? norm + D : nullptr, c, s, a.half, a.eps, D, k.data());
            T* key = keys + task * a.length * D;
            T* value = values + task * a.length * D;
            for (int d = 0; d < D; d += W) store(key + position * D + d, load(&k[d]));
            std::memcpy(value + position * D, in + (a.heads + 1) * D, D * sizeof(T));
            const int64_t first = a.window > 0 && position >= a.window ? position - a.window + 1 : 0;
            attend_group<T, ND>(q.data(), a.heads, key + first * D, value + first * D, position + 1 - first,
                                scores.data(), stride, a.sinks ? a.sinks + task % a.groups * a.heads : nullptr,
                                out + task * a.heads * D);
        }
    }
}

template <typename T>
int attend(const void* qkv, const float* norm, const void* cos, const void* sin, void* keys, void* values,
           const int64_t* positions, void* out, int64_t head_dim, const Attention& a) {
#define CASE(ND)                                                                                                  \
    case ND:                                                                                                      \
        attend_rows<T, ND>((const T*)qkv, norm, (const T*)cos, (const T*)sin, (T*)keys, (T*)values,     \
                           positions, (T*)out, a);                                                                \
        return 0;
    switch (head_dim / W) {
        SIZES
    }
#undef CASE
    return 1;
}

template <typename T>
void add_norm(T* hidden, const T* delta, const float* weight, T* out, int64_t rows, int64_t dim, float eps) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; ++i)
        add_norm_row(hidden + i * dim, delta ? delta + i * dim : nullptr, weight, out + i * dim, dim, eps);
}

// Gradients of out = x / rms(x) * weight. With n = x / rms and a = dy * weight: dx = (a - n * mean(a * n)) / rms; the
// row's dy * n is added to `dweight`. One row.
template <typename T>
void norm_backward_row(const T* x, const T* dy, const float* weight, T* dx, float* dweight, int64_t dim, float eps) {
    vf squares = {}, along = {};
    for (int64_t i = 0; i < dim; i += W) {
        const vf v = load(x + i);
        squares += v * v;
        along += v * load(dy + i) * load(weight + i);
    }
    const float inverse = 1.0f / std::sqrt(sum(squares) / dim + eps);
    const float slope = sum(along) * inverse * inverse / dim;
    for (int64_t i = 0; i < dim; i += W) {
        const vf v = load(x + i), up = load(dy + i);
        store(dx + i, (up * load(weight + i) - v * slope) * inverse);
        store(dweight + i, load(dweight + i) + up * v * inverse);
    }
}

// dweight [threads, dim] holds zeros; each thread sums the same rows in the same order in every call.
template <typename T>
void norm_backward(const T* x, const T* dy, const float* weight, T* dx, float* dweight, int64_t rows, int64_t dim,
                   int64_t threads, float eps) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t part = 0; part < threads; ++part)
        for (int64_t i = rows * part / threads; i < rows * (part + 1) / threads; ++i)
            norm_backward_row(x + i * dim, dy + i * dim, weight, dx + i * dim, dweight + part * dim, dim, eps);
}

template <typename T>
void silu_mul(const T* gate_up, T* out, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
        const T* gate = gate_up + 2 * i * width;
        for (int64_t j = 0; j < width; j += W) {
            vf g = load(gate + j);
            store(out + i * width + j, g / (1.0f + vexp(-g)) * load(gate + width + j));
        }
    }
}

// Gradient of silu(gate) * up, both halves of a row of gate_up.
template <typename T>
void silu_mul_backward(const T* gate_up, const T* grad, T* out, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
        const T* gate = gate_up + 2 * i * width;
        T* dgate = out + 2 * i * width;
        for (int64_t j = 0; j < width; j += W) {
            const vf g = load(gate + j), up = load(grad + i * width + j);
            const vf share = 1.0f / (1.0f + vexp(-g));
            store(dgate + j, up * load(gate + width + j) * share * (1.0f + g * (1.0f - share)));
            store(dgate + width + j, up * g * share);
        }
    }
}

}  // namespace

extern "C" {

int megarl_attend(int is_bf16, const void* qkv, const float* norm, const void* cos, const void* sin, void* keys,
                  void* values, const int64_t* positions, void* out, const float* sinks, int64_t rows, int64_t groups,
                  int64_t heads, int64_t head_dim, int64_t length, int64_t window, int64_t half, float scale,
                  float eps) {
    const Attention a{rows, groups, heads, length, window, half, groups * (heads + 2) * head_dim, scale, eps, sinks};
    return is_bf16 ? attend<bf16>(qkv, norm, cos, sin, keys, values, positions, out, head_dim, a)
                   : attend<float>(qkv, norm, cos, sin, keys, values, positions, out, head_dim, a);
}

// x: q, k, v, out, dout, dq, dk, dv; forward (writes out and lse) when dout is null, backward (reads them) otherwise.
int megarl_stream(int is_bf16, void* const* x, float* lse, const int64_t* starts, const int64_t* parents, int64_t nodes,
                  int64_t groups, int64_t heads, int64_t head_dim, int64_t threads, float scale) {
    const Stream s{starts, parents, nodes, groups, heads, threads, scale};
    return is_bf16 ? stream<bf16>(x, lse, head_dim, s) : stream<float>(x, lse, head_dim, s);
}

void megarl_add_norm(int is_bf16, void* hidden, const void* delta, const float* weight, void* out, int64_t rows,
                     int64_t dim, float eps) {
    if (is_bf16)
        add_norm((bf16*)hidden, (const bf16*)delta, weight, (bf16*)out, rows, dim, eps);
    else
        add_norm((float*)hidden, (const float*)delta, weight, (float*)out, rows, dim, eps);
}

void megarl_norm_backward(int is_bf16, const void* x, const void* dy, const float* weight, void* dx, float* dweight,
                          int64_t rows, int64_t dim, int64_t threads, float eps) {
    if (is_bf16)
        norm_backward((const bf16*)x, (const bf16*)dy, weight, (bf16*)dx, dweight, rows, dim, threads,
                      eps);
    else
        norm_backward((const float*)x, (const float*)dy, weight, (float*)dx, dweight, rows, dim, threads,
                      eps);
}

void megarl_silu_mul(int is_bf16, const void* gate_up, void* out, int64_t rows, int64_t width) {
    if (is_bf16)
        silu_mul((const bf16*)gate_up, (bf16*)out, rows, width);
    else
        silu_mul((const float*)gate_up, (float*)out, rows, width);
}

void megarl_silu_mul_backward(int is_bf16, const void* gate_up, const void* grad, void* out, int64_t rows,
                              int64_t width) {
    if (is_bf16)
        silu_mul_backward((const bf16*)gate_up, (const bf16*)grad, (bf16*)out, rows, width);
    else
        silu_mul_backward((const float*)gate_up, (const float*)grad, (float*)out, rows, width);
}

void megarl_statistics(int is_bf16, const void* logits, const int64_t* targets, float* out, int64_t out_stride,
                       int with_entropy, int64_t rows, int64_t columns, int64_t stride, int64_t start,
                       float inverse_temperature) {
    const Vocabulary v{rows, columns, stride, start, inverse_temperature};
    if (is_bf16)
        statistics((const bf16*)logits, targets, out, out_stride, with_entropy, v);
    else
        statistics((const float*)logits, targets, out, out_stride, with_entropy, v);
}

// numbers: log_z, entropy, grad_logp, grad_entropy.
void megarl_gradients(int is_bf16, int to_bf16, const void* logits, const int64_t* targets, const float* const* numbers,
                      void* out, int64_t rows, int64_t columns, int64_t stride, int64_t start,
                      float inverse_temperature) {
    const Vocabulary v{rows, columns, stride, start, inverse_temperature};
    const float *log_z = numbers[0], *entropy = numbers[1], *up = numbers[2], *slope = numbers[3];
    if (is_bf16 && to_bf16)
        gradients((const bf16*)logits, targets, log_z, entropy, up, slope, (bf16*)out, v);
    else if (is_bf16)
        gradients((const bf16*)logits, targets, log_z, entropy, up, slope, (float*)out, v);
    else if (to_bf16)
        gradients((const float*)logits, targets, log_z, entropy, up, slope, (bf16*)out, v);
    else
        gradients((const float*)logits, targets, log_z, entropy, up, slope, (float*)out, v);
}

// seeds and index are null where the most likely token is wanted.
void megarl_draw(int is_bf16, const void* logits, const int64_t* seeds, const int64_t* index, double* out, int64_t rows,
                 int64_t columns, int64_t stride, int64_t start, float inverse_temperature) {
    const Vocabulary v{rows, columns, stride, start, inverse_temperature};
    if (is_bf16)
        draw((const bf16*)logits, seeds, index, out, v);
    else
        draw((const float*)logits, seeds, index, out, v);
}
}
